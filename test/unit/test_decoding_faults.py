"""Decoders that crash, lie or take too much: every harm stays in its process."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from qwen3_omni_neuron.errors import (
    AudioError,
    ImageError,
    InputError,
    VideoError,
)
from qwen3_omni_neuron.helpers.media import pool, wire
from qwen3_omni_neuron.helpers.media.job import MIB
from testing.decoding_cases import SharedPool, job_of, picture, sound
from testing.decoding_faults import fault, says
from testing.subprocesses import open_files


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPool]:
    decoders = SharedPool()
    yield decoders
    decoders.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (fault("signal", number=int(signal.SIGSEGV)), "its decoder was ended by SIGSEGV"),
        (fault("signal", number=int(signal.SIGKILL)), "its decoder was ended by SIGKILL"),
        (fault("signal", number=int(signal.SIGXCPU)), "more than 120 s of processors' time"),
        (fault("memory", size=1 << 40), "more than 512 MiB of memory"),
        (fault("memory", size=600 * MIB), "more than 512 MiB of memory"),
        (fault("no such"), "its decoder ended with exit status 1"),
        (says(), "its decoder ended with exit status 0"),
        (says({"measured": [1.0, 0, 64000]}), "its decoder ended with exit status 0"),
    ],
)
@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_what_a_codec_does_to_itself_ends_its_item_alone(
    shared: SharedPool, kind: str, wrong: bytes, said: str
) -> None:
    error = {"audio": AudioError, "image": ImageError, "video": VideoError}[kind]
    advice = r"\. Send it in another format, or smaller\.$"
    with pytest.raises(error, match=f"^here can't be decoded: .*{said}.*{advice}"):
        shared.decode(job_of(kind, wrong))
    assert shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).measured.seconds == 1.3


def test_a_crash_is_told_also_where_the_fork_server_ends_right_after_it(
    shared: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_exit(child: Any, exited: Any) -> None:
        before(child, exited)
        child._server.end()

    before = pool._Child._on_exit
    monkeypatch.setattr(pool._Child, "_on_exit", on_exit)
    with pytest.raises(ImageError, match="its decoder was ended by SIGSEGV"):
        shared.decode(job_of("image", fault("signal", number=int(signal.SIGSEGV))))


@pytest.mark.parametrize(
    "content",
    [
        lambda: picture("PNG", Image.new("L", (16384, 16384)).convert("1")),
        lambda: picture("TIFF", Image.new("1", (16384, 8192)), compression="group4"),
    ],
    ids=["png", "tiff"],
)
def test_a_bomb_gets_no_more_memory_than_a_decoder_may_have(
    shared: SharedPool, content: Callable[[], bytes]
) -> None:
    said = "more than 512 MiB of memory|is too large"
    with pytest.raises(ImageError, match=f"^here.*({said})"):
        shared.decode(job_of("image", content()))


HOLDS = vars(wire.Holding(samples=16000))
MEASURED = {"measured": [1.0, 0, 64000]}
PICTURE = vars(wire.Holding(1, 32, 32))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("audio", ["hello, this is no length"]),
        ("audio", [wire.packed({}).decode()]),
        ("audio", ["\x01\x00\x00\x00{"]),
        ("audio", ["\x07\x00\x00\x00[1,2,3]"]),
        ("audio", ["\x7f\x7f\x00\x00" + "[" * 0x7F7F]),
        ("audio", [{"measured": 1, "error": 2}]),
        ("audio", [{"holds": HOLDS}]),
        ("audio", [{"measured": [1.0, 0]}]),
        ("audio", [{"measured": [True, 0, 1]}]),
        ("audio", [{"measured": [1.0, 0, -1]}]),
        ("audio", [{"measured": [1.0, 0, 1.5]}]),
        ("audio", [{"measured": [1.0, 0, 10**400]}]),
        ("audio", ['\x1b\x00\x00\x00{"measured": [1e999, 0, 1]}']),
        ("audio", ['\x19\x00\x00\x00{"measured": [NaN, 0, 1]}']),
        ("audio", [{"error": ["SystemExit", "no"]}]),
        ("audio", [{"error": ["AudioError"]}]),
        ("audio", [{"error": "AudioError"}]),
        ("audio", [MEASURED, {"holds": {}}]),
        ("audio", [MEASURED, {"holds": [1]}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": 1 << 40}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": -1}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": 0}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"dtype": "object"}}]),
        ("audio", [MEASURED, {"holds": PICTURE}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"warnings": "cut"}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"warnings": [1]}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"warnings": ["x" * 1001, "y" * 1001]}}]),
        ("image", [MEASURED, {"holds": HOLDS}]),
        ("image", [MEASURED, {"holds": PICTURE | {"frames": 2}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"height": 1 << 30, "width": 1 << 30}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"width": 0}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"fitted": 1}}]),
        ("video", [MEASURED, {"holds": PICTURE}]),
        ("video", [MEASURED, {"holds": PICTURE | {"fps": "2"}}]),
    ],
)
def test_answers_that_no_decoder_of_ours_gives_are_refused(
    shared: SharedPool, kind: str, said: list[Any]
) -> None:
    with pytest.raises(InputError, match=r"^here can't be decoded: its decoder gave no proper"):
        shared.decode(job_of(kind, says(*said)))


def test_a_result_of_a_process_that_crashes_while_it_writes_is_refused(shared: SharedPool) -> None:
    content = says(MEASURED, {"holds": HOLDS}, status=7)
    with pytest.raises(AudioError, match="its decoder ended with exit status 7"):
        shared.decode(job_of("audio", content))


def test_a_result_that_its_process_cuts_short_is_refused(shared: SharedPool) -> None:
    with pytest.raises(AudioError, match="its decoder gave no proper answer"):
        shared.decode(job_of("audio", fault("cut")))


def test_a_child_that_says_much_and_waits_for_nothing_is_refused(shared: SharedPool) -> None:
    with pytest.raises(AudioError, match="can't be decoded"):
        shared.decode(job_of("audio", says("\xff" * (1 << 22), go_on=False)))


def test_a_message_of_a_child_is_bounded_and_has_no_control_characters(shared: SharedPool) -> None:
    error = {"error": ["AudioError", "bad \x1b[31m" + "x" * 9000]}
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", says(error)))
    assert str(found.value).startswith("bad \\x1b[31mxxx")
    assert len(str(found.value)) < 2100


def test_a_child_has_limits_and_no_more_than_it_needs(shared: SharedPool) -> None:
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", fault("report")))
    state = json.loads(str(found.value))
    limits = state["limits"]
    assert not state["torch"]
    assert (state["threads"], state["nice"] - os.nice(0), state["ignored"]) == (1, 5, False)
    assert state["files"] == 6  # of the standard streams, its connection, content and result
    assert limits["AS"] <= state["mapped"] + 512 * MIB
    del limits["AS"]
    assert limits == {"CPU": 120, "CORE": 0, "FSIZE": MIB, "NOFILE": 64}


def test_a_result_keeps_no_file_open(shared: SharedPool) -> None:
    before = len(open_files())
    kept = [shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).item for _ in range(3)]
    assert len(open_files()) == before
    assert all(item["audio"].flags.writeable for item in kept)
