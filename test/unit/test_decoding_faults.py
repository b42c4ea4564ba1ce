"""Decoders that crash, lie or take too much: every harm stays in its process."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from qwen3_omni_neuron.errors import AudioError, ImageError, InputError
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.job import ERRORS, MIB
from testing.decoding_cases import SharedPool, job_of, picture, sound
from testing.decoding_faults import fault, says
from testing.subprocesses import lives, open_files, run_python, wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPool]:
    decoders = SharedPool()
    yield decoders
    decoders.close()


MEASURED = wire.packed(wire.MEASURED, 1.0, 0, 64000)


def holds(*numbers: float) -> bytes:
    return wire.packed(wire.HOLDS, *numbers)


def test_what_a_codec_does_to_itself_ends_its_item_alone(shared) -> None:
    for wrong, said in (
        (fault("signal", number=int(signal.SIGSEGV)), "was ended by SIGSEGV"),
        (fault("signal", number=int(signal.SIGKILL)), "was ended by SIGKILL"),
        (fault("signal", number=int(signal.SIGXCPU)), "needed more than 60 s of processor time"),
        (fault("memory", size=1 << 40), "needed more than 512 MiB of memory"),
        (fault("memory", size=600 * MIB), "needed more than 512 MiB of memory"),
        (fault("no such"), "ended with exit status 1"),
        (fault("deaf"), "closed its connection, but did not end"),
        (says(), "ended with exit status 0"),
        (says(MEASURED), "ended with exit status 0"),
        (says(MEASURED, holds(0, 0, 0, 16000), status=7), "ended with exit status 7"),
        (fault("cut"), "truncated its result"),
    ):
        for kind in ("audio", "image", "video") if b'"says"' not in wrong else ("audio",):
            if kind != "audio" and wrong == fault("cut"):
                continue
            advice = r"\. Send another format, or a smaller file\.$"
            match = f"^here can't be decoded: its decoder {said}.*{advice}"
            with pytest.raises(ERRORS[kind], match=match):
                shared.decode(job_of(kind, wrong))
        assert len(shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).item["audio"]) == 20_800


def test_a_bomb_gets_no_more_memory_than_a_decoder_may_have(shared) -> None:
    for content in (
        lambda: picture("PNG", Image.new("L", (16384, 16384)).convert("1")),
        lambda: picture("TIFF", Image.new("1", (16384, 8192)), compression="group4"),
    ):
        with pytest.raises(ImageError, match=r"^here.*(more than 512 MiB of memory|is too large)"):
            shared.decode(job_of("image", content()))


def test_answers_that_no_decoder_of_ours_gives_are_refused(shared) -> None:
    for kind, said in (
        ("audio", [b"hello, this is no answer" * 9]),
        ("audio", [b"m" + b"\xff" * 52]),  # not a number
        ("audio", [wire.packed(wire.MEASURED, 1.0, 0, -1)]),
        ("audio", [wire.packed(wire.MEASURED, float("inf"), 0, 1)]),
        ("audio", [wire.packed(wire.MEASURED, 1.0, 0, 1e30)]),
        ("audio", [wire.HEAD.pack(wire.MEASURED, *[0.0] * 6, 1 << 31)]),
        ("audio", [wire.packed(wire.ERROR, text="SystemExit\nno")]),
        ("audio", [wire.packed(wire.ERROR)]),
        ("audio", [holds(0, 0, 0, 16000)]),
        ("audio", [MEASURED, MEASURED]),
        ("audio", [MEASURED, holds(0, 0, 0, 1 << 40)]),
        ("audio", [MEASURED, holds(0, 0, 0, 0)]),
        ("audio", [MEASURED, holds(1, 32, 32, 0)]),
        ("audio", [MEASURED, holds(0, 0, 0, 16000), MEASURED]),
        ("image", [MEASURED, holds(0, 0, 0, 16000)]),
        ("image", [MEASURED, holds(2, 32, 32)]),
        ("image", [MEASURED, holds(1, 1 << 30, 1 << 30)]),
        ("image", [MEASURED, holds(1, 32, 0)]),
        ("video", [MEASURED, holds(1, 32, 32)]),
    ):
        with pytest.raises(InputError, match=r"^here can't be decoded: its decoder sent "):
            shared.decode(job_of(kind, says(*said)))


def test_a_child_that_says_much_and_waits_for_nothing_is_refused(shared) -> None:
    with pytest.raises(AudioError, match="can't be decoded"):
        shared.decode(job_of("audio", says(b"\xff" * (1 << 14), go_on=False)))


def test_a_message_of_a_child_is_bounded_and_has_no_control_characters(shared) -> None:
    error = wire.packed(wire.ERROR, text="AudioError\nbad \x1b[31m" + "x" * 9000)
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", says(error)))
    assert str(found.value).startswith("bad \\x1b[31mxxx")
    assert len(str(found.value)) < 2100


def test_a_child_has_limits_and_no_more_than_it_needs(shared) -> None:
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", fault("report")))
    state = json.loads(str(found.value))
    limits = state["limits"]
    assert not state["torch"] and state["own session"] and state["no new privileges"]
    assert (state["threads"], state["nice"] - os.nice(0), state["ignored"]) == (1, 5, False)
    assert state["files"] == 5  # the standard streams, its connection and result
    assert limits["AS"] <= state["mapped"] + 512 * MIB
    del limits["AS"]
    assert limits == {"CPU": 60, "CORE": 0, "FSIZE": MIB, "NOFILE": 64, "NPROC": 0}


NO_MORE = """
import _thread, os
from qwen3_omni_neuron.helpers import media_work
from qwen3_omni_neuron.helpers.fork_server import limit
from testing.decoding_cases import grey_video, job_of
job = job_of("video", grey_video(30, 640, 480))
media_work.decode(job, print)
limit(1 << 30, 10)
if os.getuid() == 0:  # which has no limit of processes
    os.setuid(65534)
for start in (os.fork, lambda: _thread.start_new_thread(print, ())):
    try:
        print("started", start())
    except (OSError, RuntimeError):
        print("refused")
print(len(media_work.decode(job, print).pixels))
"""


def test_a_child_that_is_not_roots_decodes_and_starts_no_process_and_no_thread() -> None:
    refused, also_refused, _, frames = run_python("-c", NO_MORE).splitlines()[1:]
    assert refused == also_refused == "refused" and int(frames) == 4


@pytest.mark.usefixtures("cold_starts")
def test_a_child_knows_no_key_and_its_own_children_end_with_it(monkeypatch) -> None:
    monkeypatch.setenv("QWEN3_OMNI_API_KEYS", "a-key-0123456789")
    shared = SharedPool()
    with pytest.raises(AudioError) as grandchild:
        shared.decode(job_of("audio", fault("family")))
    wait_until(lambda: not lives(int(str(grandchild.value))))
    pid = shared.pool.pid
    assert b"a-key" not in Path(f"/proc/{pid}/environ").read_bytes()
    shared.close()


def test_a_result_keeps_no_file_open(shared) -> None:
    before = len(open_files())
    kept = [shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).item for _ in range(3)]
    assert len(open_files()) == before
    assert all(item["audio"].flags.writeable for item in kept)
