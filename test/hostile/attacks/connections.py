"""Connections that are silent, slow or half open; heads without end."""

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from test.hostile.attacks.good_client import good_question
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, CUT, REFUSED, WAIT_S, Outcome, check
from test.hostile.attacks.over_http import answer_of, head_of, raw
from test.hostile.attacks.target import ServerSpec, Target, stopped, waited
from testing.raw_http import CHAT, connected

EITHER = frozenset((ANSWERED, REFUSED))
NO_OR_CUT = frozenset((REFUSED, CUT))
ANY = NO_OR_CUT | {ANSWERED}
GRACE_S = 3.0  # for the server to cut a connection after its deadline
MANY = 300
PACE_BYTES = 365_000  # per second, for a client that reads slowly and without a pause


@contextlib.contextmanager
def sockets(target: Target, count: int) -> Iterator[list[socket.socket]]:
    """Open TCP connections to the proxy that send nothing, not even the begin of TLS."""
    url = target.front.replace("https:", "http:")
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                made.append(stack.enter_context(connected(url, 5)))
        yield made


def still_open(socks: Sequence[socket.socket], timeout_s: float) -> int:
    """Wait until the server has closed all connections. Returns how many are open after a time."""
    left, end_s = set(socks), time.monotonic() + timeout_s
    while left and (wait_s := end_s - time.monotonic()) > 0:
        ready = select.select(list(left), [], [], wait_s)[0]
        for one in ready:
            try:
                ended = not one.recv(1 << 16)
            except OSError:
                ended = True
            left -= {one} if ended else set()
    return len(left)


def silent(target: Target) -> list[Outcome]:
    """Open 300 connections, begin TLS on half of them, and send nothing more."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the head of a record of 512 bytes
    with sockets(target, MANY) as made:
        for one in made[::2]:
            with contextlib.suppress(OSError):
                one.sendall(hello)
        left = still_open(made, target.deadlines.header_s + GRACE_S)
    return [check(not left, f"{left} of {MANY} are open {GRACE_S:g} s after the header timeout")]


def dripping(
    target: Target, start: bytes, byte: bytes, within_s: float, count: int = 50
) -> list[Outcome]:
    """Send a byte at a time on many connections, and check that all are closed in time."""
    end_s = time.monotonic() + within_s + GRACE_S
    with contextlib.ExitStack() as stack:
        left = {stack.enter_context(connected(target.front, WAIT_S)) for _ in range(count)}
        for one in left:
            one.sendall(start)
        answers = []
        while left and time.monotonic() < end_s:
            for one in select.select(list(left), [], [], 0.1)[0]:
                left.discard(one)
                answers.append(answer_of(one, time.monotonic()))
            for one in list(left):
                with contextlib.suppress(OSError):
                    one.sendall(byte)
    late = f"{len(left)} of {count} are open {GRACE_S:g} s after their time"
    return [*answers, check(not left, late)]


def slow_heads(target: Target) -> list[Outcome]:
    """Send a header a byte at a time."""
    return dripping(
        target, b"POST /v1/chat/completions HTTP/1.1\r\na: ", b"x", target.deadlines.header_s
    )


def slow_bodies(target: Target) -> list[Outcome]:
    """Send a body a byte at a time, and announce a body that never comes."""
    head = head_of(target, CHAT, 100_000)
    return [
        *dripping(target, head, b" ", target.deadlines.body_s),
        *dripping(target, head, b"", target.deadlines.body_s, 20),
    ]


def half_open(target: Target) -> list[Outcome]:
    """Ask for a long answer and never read it, or end the sending side; then count open sockets."""
    data = asking(target, 30.0)
    with contextlib.ExitStack() as stack:
        silent = partial(connected, target.front, WAIT_S, buffer_bytes=4096)
        made = [stack.enter_context(silent()) for _ in range(8)]
        for one in made:
            one.sendall(data)
        for one in made[4:]:
            one.shutdown(socket.SHUT_WR)
        # Their answers are made first, which takes time on a busy machine.
        done = waited(lambda: not _running(target), 20)
        time.sleep(target.deadlines.send_s + GRACE_S)
        # The system's buffers are small, and their content still arrives, slowly; then the end of a
        # connection that was cut.
        left = still_open(made, 20)
    return [
        check(done, "requests are in progress still"),
        check(not left, f"{left} connections are open still"),
    ]


def _running(target: Target) -> float:
    return target.counters().get("qwen3_omni_requests_in_progress", 0.0)


def endless_heads(target: Target) -> list[Outcome]:
    """Send request lines, headers, chunks and requests without end, or that contradict."""
    start = head_of(target, CHAT, 0).removesuffix(b"\r\n").replace(b"content-length: 0\r\n", b"")
    chunked = start + b"transfer-encoding: chunked\r\n\r\n"
    cases = {
        "request line": b"GET /" + b"a" * (8 << 20),
        "one header": start + b"a: " + b"x" * (8 << 20),
        "10,000 headers": start + b"a: b\r\n" * 10_000 + b"\r\n",
        "headers of 60 KiB": start + b"".join(b"a%d: %s\r\n" % (i, b"x" * 1000) for i in range(60)),
        "extension of a chunk": chunked + b"1;" + b"x" * (8 << 20),
        "size of a chunk": chunked + b"F" * 40 + b"\r\n",
        "trailer": chunked + b"1\r\nx\r\n0\r\na: " + b"x" * (8 << 20),
        "two lengths": start + b"content-length: 1\r\ncontent-length: 9\r\n\r\nx",
        "length and chunks": start + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\nx",
        "length of 5,001 digits": start + b"content-length: " + b"9" * 5001 + b"\r\n\r\n",
        "length of 5,000 zeros": start + b"content-length: " + b"0" * 5000 + b"1\r\n\r\nx",
        "length below 0": start + b"content-length: -1\r\n\r\n",
        "no HTTP": b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 40,
        "empty lines": b"\r\n" * (1 << 20),
    }
    return [
        raw(target, data, label, target.deadlines.header_s + target.deadlines.body_s + GRACE_S)
        for label, data in cases.items()
    ]


def upgrades(target: Target) -> list[Outcome]:
    """Ask for HTTP/2 and for a protocol that nobody knows, as clients that know HTTP/2 do."""
    body = json.dumps({**good_question(False), "modalities": ["text"], "audio": None}).encode()
    found = []
    for name in ("h2c", "nobody/9"):
        more = {"connection": "Upgrade, HTTP2-Settings", "upgrade": name, "http2-settings": "AAMA"}
        for length in (len(body), None):
            sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if length is None else body
            found.append(raw(target, head_of(target, CHAT, length, more) + sent, name))
    return found


def pipelined(target: Target) -> list[Outcome]:
    """Send 10,000 requests without waiting for their answers."""
    with connected(target.front, WAIT_S) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 10_000)
        left = still_open([sock], target.deadlines.header_s + GRACE_S)
    return [check(not left, "the connection is open still")]


# Clients that read slowly


def asking(target: Target, sound_s: float) -> bytes:
    """Return a request for about sound_s of sound, as one whole answer."""
    # The text has no end before its limit: its last word is repeated.
    long = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": round(sound_s * 10)}
    long |= {"talker_max_new_tokens": round(sound_s * 12.5)}
    body = json.dumps(
        {**good_question(False), **long, "audio": {"voice": "Ethan", "format": "wav"}}
    )
    return head_of(target, CHAT, len(body), {"connection": "close"}) + body.encode()


def read_slowly(target: Target, begun: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Read a long answer slowly, without a pause. begun: called after the first part."""
    with connected(target.front, WAIT_S, buffer_bytes=1 << 16) as sock:
        sock.sendall(asking(target, 45.0 if target.short else 90.0))
        answer = http.client.HTTPResponse(sock)
        got, wanted, start_s = 0, 0, 0.0
        try:
            answer.begin()
            wanted, start_s = answer.length or 0, time.monotonic()
            while part := answer.read1(PACE_BYTES // 20):
                got += len(part)
                if got == len(part):
                    begun()
                time.sleep(max(0.0, start_s + got / PACE_BYTES - time.monotonic()))
        except (OSError, http.client.HTTPException):
            pass  # it was cut too early
        finally:
            answer.close()
    whole = wanted > 1_000_000 and got == wanted
    return [check(whole, f"{got:,} of {wanted:,} bytes came, status {answer.status}")]


def drained(target: Target) -> list[Outcome]:
    """Read slowly while the server drains."""
    found = read_slowly(target, target.process.terminate)
    status = stopped(target.process, 30)
    return [*found, check(status == 0, f"the server ended with status {status}")]


PROXIED = ServerSpec(proxy=True)
KINDS = (
    Kind("silent", "300 silent connections, half of which begin TLS", silent, ANY, PROXIED),
    Kind("slow-heads", "50 headers, a byte at a time", slow_heads, NO_OR_CUT, PROXIED),
    Kind("slow-bodies", "50 bodies, a byte at a time; 20 that never come", slow_bodies, NO_OR_CUT),
    Kind("half-open", "8 clients that ask for much and never read", half_open, ANY, PROXIED),
    Kind("endless-heads", "heads, chunks, trailers without end", endless_heads, NO_OR_CUT, PROXIED),
    Kind(
        "upgrades",
        "a body after `Upgrade: h2c` or an unknown protocol",
        upgrades,
        frozenset((ANSWERED,)),
        PROXIED,
    ),
    Kind("pipelined", "10,000 requests ahead of their answers", pipelined, ANY, PROXIED),
    Kind("slow-reader", "a client that reads 365 KB/s", read_slowly, EITHER, PROXIED),
    Kind(
        "slow-reader-drain",
        "the same while the server drains",
        drained,
        EITHER,
        ServerSpec(proxy=True, own=True, ends_with=0),
        good=False,
    ),
)
