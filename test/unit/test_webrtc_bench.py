"""bench/webrtc.py: what its figures say, and its relay. aiortc itself is not needed."""

import asyncio
import random
import sys

import pytest

from bench import webrtc
from bench.common.command_line import InputError
from bench.webrtc import Address, Relay, figures, through

SDP = "\r\n".join(
    [
        "m=audio 40000 UDP/TLS/RTP/SAVPF 96",
        "a=candidate:1 1 udp 2130706431 10.0.0.2 40000 typ host",
        "a=candidate:2 1 udp 1694498815 10.0.0.3 40001 typ host",
        "a=end-of-candidates",
        "a=mid:0",
        "",
    ]
)


def test_a_stall_and_what_is_missing_after_it() -> None:
    """A frame that comes 120 ms late, after six that never do; then frames that stay late."""
    times = [0.02 * n for n in range(100)]
    arrivals = [(t, 5 + t) for t in times] + [(2.12, 5 + 2.12)]
    found = figures(arrivals)
    assert (found["frames"], found["missing_ms"]) == (101, 120)
    assert found["stall_ms_max"] == pytest.approx(120, abs=0.1)
    assert found["stalls"] == pytest.approx(60 / 2.12, abs=0.1), "one in 2.12 s"
    late = figures([(t + (0.2 if t > 0.8 else 0), t) for t in times])
    assert (late["missing_ms"], late["behind_ms"]) == (0, 200.0)
    with pytest.raises(InputError, match="1 frames were received"):
        figures(arrivals[:1])


def test_a_description_names_the_relay_alone() -> None:
    changed, peer = through(SDP, ("127.0.0.1", 5000))
    assert peer == ("10.0.0.2", 40000)
    assert changed == SDP.replace("10.0.0.2 40000", "127.0.0.1 5000").replace(
        "a=candidate:2 1 udp 1694498815 10.0.0.3 40001 typ host\r\n", ""
    )
    with pytest.raises(InputError, match="no address"):
        through("m=audio 9\r\na=end-of-candidates\r\n", ("127.0.0.1", 5000))


class Peer(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self.got.put_nowait(data)


async def relayed(loss: float) -> list[bytes]:
    """Send a packet before the relay gets worse, and four after it, and one back."""
    relay, loop = Relay(loss, 0.01, random.Random(0)), asyncio.get_running_loop()
    made = [
        await loop.create_datagram_endpoint(Peer, local_addr=("127.0.0.1", 0)) for _ in range(2)
    ]
    sides = await relay.open()
    for side, (transport, _) in enumerate(made):
        relay.connect(side, transport.get_extra_info("sockname"))
    (first, ours), (second, theirs) = made
    first.sendto(b"before", sides[0])
    got = [await asyncio.wait_for(theirs.got.get(), 20)]
    relay.worse = True
    for _ in range(4):
        first.sendto(b"after", sides[0])
    if loss == 0:
        got += [await asyncio.wait_for(theirs.got.get(), 20) for _ in range(4)]
    second.sendto(b"back", sides[1])
    if loss == 0:
        got.append(await asyncio.wait_for(ours.got.get(), 20))
    else:
        await asyncio.sleep(0.1)
        assert ours.got.empty() and theirs.got.empty()
    for transport, _ in made:
        transport.close()
    relay.close()
    return got


def test_the_relay_passes_packets_on_or_loses_them() -> None:
    assert asyncio.run(relayed(0.0)) == [b"before", *4 * [b"after"], b"back"]
    assert asyncio.run(relayed(1.0)) == [b"before"]


def test_without_aiortc_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiortc", None)
    assert webrtc.main(["--seconds", "1"]) != 0
    assert "pip install aiortc" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        webrtc.main(["--loss", "-1"])
