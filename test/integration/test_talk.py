"""`qwen3-omni-neuron talk`: from file to file, and by a microphone and a loudspeaker of the test's.

What is said is judged by train/judge.py, as in test_speaking.
"""

import _thread
import base64
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.cli import main, make_parser, talk_client, talk_sound
from qwen3_omni_neuron.cli.talk_sound import Player
from qwen3_omni_neuron.errors import ExitStatus, OptionError
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import serving, url_of, wait_until
from testing.media_cases import QUESTION_WAV
from testing.scripted_model import ScriptedModel
from testing.sound_devices import SoundDevices
from train.judge import Judge
from train.speech import MEASURING, spoken_clip

SUM_WAV = QUESTION_WAV.with_name("sum.wav")
SUM = soxr.resample(*soundfile.read(SUM_WAV, dtype="float32"), 16000)
LONG_WORDS = "seven red goodbye white"
LONG = spoken_clip(f"say {LONG_WORDS}", MEASURING, random.Random(1))
IN_A_PROCESS = """
import sys
from testing.sound_devices import SoundDevices
sys.modules["sounddevice"] = SoundDevices()
from qwen3_omni_neuron.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=2) as omni, serving(omni) as running:
        yield running


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SoundDevices:
    made = SoundDevices()
    monkeypatch.setitem(sys.modules, "sounddevice", made)
    return made


@pytest.fixture(params=["model", "server"])
def partner(request: pytest.FixtureRequest) -> list[str]:
    """Arguments that name the partner: a model in the same process, or a server."""
    if request.param == "model":
        return []
    return ["--url", url_of(request.getfixturevalue("server"))]


def heard(judge: Judge, devices: SoundDevices, since: int = 0) -> list[str]:
    return [word.word for word in judge.hear(np.concatenate(devices.heard[since:]))]


def test_a_question_in_a_file_is_answered_into_a_file(
    partner: list[str], judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answer.wav"
    files = ["--from", str(SUM_WAV), "--to", str(out)]
    assert main(["talk", *files, "--speaker", "Chelsie", *partner]) == 0
    printed = capsys.readouterr()
    assert printed.out == "eight\n"
    assert "knows 25 words" not in printed.err  # no terminal
    samples, rate = soundfile.read(out, dtype="float32")
    [word] = judge.hear(samples)
    assert (rate, word.word, word.speaker) == (24000, "eight", "chelsie")


def test_speech_interrupts_the_answer(
    partner: list[str],
    judge: Judge,
    devices: SoundDevices,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hands free, until Ctrl-C. The first answer is silent before the second question has ended."""
    second: list[int] = []

    def converse() -> None:
        devices.say(np.concatenate((np.zeros(8000, np.float32), LONG)))
        wait_until(lambda: devices.sounded_s() > 0.4, 30)
        devices.say(SUM)
        wait_until(lambda: devices.silent)
        assert devices.sounded_s(-25) == 0  # where the first answer would still play
        second.append(len(devices.heard))
        wait_until(lambda: devices.sounded_s(second[0]) > 0.2, 30)
        wait_until(lambda: devices.sounded_s(-25) == 0, 30)

    assert talk([*partner, "--hands-free"], converse) == 130
    assert heard(judge, devices, second[0]) == ["eight"]
    first, last = capsys.readouterr().out.split("\n")[:2]
    assert LONG_WORDS.startswith(first)
    assert last == "eight"


@contextmanager
def typing(
    lines: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Call a function in a thread, with a function that presses Enter. Stdin ends with it."""
    failures: list[BaseException] = []
    read, write = os.pipe()

    def run() -> None:
        with os.fdopen(write, "wb", buffering=0) as keyboard:
            try:
                lines(lambda: keyboard.write(b"\n"))
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=run)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        thread.start()
        try:
            yield
        finally:
            thread.join()
    assert failures == []


def test_speech_between_two_enters_alone_is_a_turn(
    partner: list[str],
    judge: Judge,
    devices: SoundDevices,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speech before the first of them is not heard; a third interrupts the answer."""

    def lines(enter: Callable[[], object]) -> None:
        devices.say(LONG)
        wait_until(lambda: devices.silent)
        enter()
        devices.say(SUM)
        wait_until(lambda: devices.silent)
        enter()
        wait_until(lambda: devices.sounded_s() > 0.2, 30)
        wait_until(lambda: devices.sounded_s(-25) == 0, 30)
        enter()
        devices.say(LONG)
        wait_until(lambda: devices.silent)
        enter()
        before = len(devices.heard)
        wait_until(lambda: devices.sounded_s(before) > 0.4, 30)
        enter()
        after = len(devices.heard)
        wait_until(lambda: len(devices.heard) > after + 25)
        assert devices.sounded_s(after + 2) == 0
        second.append(before)

    second: list[int] = []
    with typing(lines, monkeypatch):
        assert main(["talk", *partner]) == 0
    assert heard(judge, devices)[0] == "eight"
    assert heard(judge, devices, second[0])[0] == "seven"


def test_an_answer_that_is_interrupted_before_it_begins(
    devices: SoundDevices,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is cancelled, and nothing that still comes of it is said or written."""
    out = tmp_path / "answer.wav"
    said: list[str] = []
    asked, ended = threading.Event(), threading.Event()

    def converse(socket: ServerConnection) -> None:
        def until(kind: str) -> None:
            while json.loads(socket.recv(timeout=10))["type"] != kind:
                pass

        def answer(response: str, text: str, level: int) -> None:
            sound = base64.b64encode(np.full(480, level, "<i2").tobytes()).decode()
            of = {"response_id": response, "item_id": f"item of {response}"}
            for event in (
                {"type": "response.created", "response": {"id": response}},
                {"type": "response.output_audio_transcript.delta", "delta": text, **of},
                {"type": "response.output_audio.delta", "delta": sound, **of},
                {"type": "response.done", "response": {"id": response, "status": "any"}},
            ):
                socket.send(json.dumps(event))

        until("response.cancel")
        error = {"code": "response_cancel_not_active", "message": "none", "param": None}
        socket.send(json.dumps({"type": "error", "error": error}))
        socket.send(json.dumps({"type": "response.output_text.delta", "delta": "ready "}))
        until("response.create")
        asked.set()
        until("response.cancel")
        answer("first", "one", 16384)
        until("response.create")
        answer("second", "two", 8192)
        assert ended.wait(20)

    def lines(enter: Callable[[], object]) -> None:
        def until(words: str) -> None:
            wait_until(lambda: said.append(capsys.readouterr().out) or words in "".join(said))

        enter()  # speak
        until("ready")
        enter()  # have it answered
        assert asked.wait(10)
        enter()  # interrupt it
        enter()
        until("two\n")

    with serve(converse, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        with typing(lines, monkeypatch):
            assert main(["talk", "--url", url, "--to", str(out)]) == 0
        ended.set()
        server.shutdown()
    assert "".join(said).split() == ["ready", "two"]
    samples, _ = soundfile.read(out, dtype="float32")
    assert len(samples) == 480 and samples == pytest.approx(0.25, abs=1e-4)


@pytest.mark.usefixtures("warm_commands")
def test_a_server_that_ends_ends_the_talk_before_enter(server: Server) -> None:
    """A process that waits for Enter ends, too."""
    with serving(server.service.model.take()) as ending:
        command = [sys.executable, "-c", IN_A_PROCESS, "talk", "--url", url_of(ending)]
        pipes: Any = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            assert "Enter: speak." in process.stderr.readline()
            process.stdin.write("\n")
            process.stdin.flush()
            assert "Speaking" in process.stderr.readline()
            ending.stop()
            assert "the server ended the session: the server ends." in process.stderr.read()
            assert process.wait(20) == 1


def talk(arguments: list[str], converse: Callable[[], None]) -> int:
    """Run the verb until a conversation in a thread has ended, and press Ctrl-C then."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            converse()
        except BaseException as error:
            failures.append(error)
        _thread.interrupt_main()

    thread = threading.Thread(target=run)
    # A shell that runs the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        status = main(["talk", *arguments])
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert failures == []
    return status


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "nonsense"], "no server answers at nonsense"),
        (["--from", "none.wav"], "--from: none.wav does not exist"),
        (["--hands-free"], "so that there is nothing for --hands-free to find"),
        (["--to", "/"], "/ is a folder"),
        (["--speaker", "nobody"], "nobody"),
    ],
)
def test_a_talk_that_can_not_begin_says_why_and_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--from", str(SUM_WAV), "--to", str(tmp_path / "out.wav")]
    assert main(["talk", *files, *arguments]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loads", [2, 100])
def test_a_server_that_loads_its_model_is_waited_for(
    loads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For so long at most."""
    refusal = {"error": {"code": "model_loading", "message": "the server is loading."}}
    asked: list[str] = []
    monkeypatch.setattr(talk_client, "_LOOK_S", 0.0)
    monkeypatch.setattr(talk_client, "LOADING_S", 600.0 if loads == 2 else -1.0)

    def answer(socket: ServerConnection, request: Request) -> Response | None:
        asked.append(request.path)
        return socket.respond(503, json.dumps(refusal)) if len(asked) <= loads else None

    def converse(socket: ServerConnection) -> None:
        socket.close(reason="it was reached")

    with serve(converse, "127.0.0.1", 0, process_request=answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        assert (
            main(["talk", "--from", str(SUM_WAV), "--url", url, "--to", str(tmp_path / "a.wav")])
            == 1
        )
        server.shutdown()
    waits, *_, last = ["", *capsys.readouterr().err.splitlines()][-2:]
    if loads == 2:
        assert waits == f"[{url} loads its model; waiting for up to 600 s, Ctrl-C ends]"
        assert last.endswith("the server ended the session: it was reached.")
    else:
        assert (waits, last) == ("", f"qwen3-omni-neuron: {url} refuses: the server is loading.")


def test_an_answer_that_a_limit_ended_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And all of it that there is."""
    out = tmp_path / "answer.flac"

    def converse(socket: ServerConnection) -> None:
        while json.loads(socket.recv(timeout=10))["type"] != "response.create":
            pass
        sound = base64.b64encode(np.full(480, 8192, "<i2").tobytes()).decode()
        for event in (
            {"type": "response.created", "response": {"id": "r"}},
            {"type": "response.output_audio_transcript.delta", "delta": "one"},
            {"type": "response.output_audio.delta", "delta": sound, "item_id": "i"},
            {"type": "response.done", "response": {"id": "r", "status": "incomplete"}},
        ):
            socket.send(json.dumps(event))

    with serve(converse, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        files = ["--from", str(SUM_WAV), "--to", str(out)]
        assert main(["talk", *files, "--url", url]) == ExitStatus.CUT
        server.shutdown()
    printed = capsys.readouterr()
    assert printed.out == "one\n"
    assert "[a limit of the server ended the answer: its end is missing]" in printed.err
    assert soundfile.info(out).frames == 480


def test_a_server_that_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its key, or the voice."""
    model: Any = ScriptedModel(["hello"])
    out = tmp_path / "out.wav"
    with serving(model, api_keys=("right",)) as locked:
        where = ["--from", str(SUM_WAV), "--to", str(out), "--url", url_of(locked)]
        assert main(["talk", *where, "--api-key", "wrong"]) == 1
        assert "no valid API key" in capsys.readouterr().err


def test_a_server_over_a_model_here_wants_its_key() -> None:
    with ExitStack() as stack:
        url, key = talk_client._serve_model(make_parser().parse_args(["talk"]), stack)
        assert url.startswith("http://127.0.0.1:")
        for wrong in ("", f"{key}x"):
            with pytest.raises(OptionError, match="no valid API key"):
                talk_client._connect(url, wrong, True, None, stack)
        assert "session.created" in talk_client._connect(url, key, True, None, stack).recv(10)


def test_a_voice_that_a_server_does_not_have(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.wav"
    where = ["--from", str(SUM_WAV), "--to", str(out), "--url", url_of(server)]
    assert main(["talk", *where, "--speaker", "nobody"]) == 1
    assert "there is no voice 'nobody'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("missing", ["microphone", "loudspeaker"])
def test_a_missing_microphone_or_loudspeaker_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", SoundDevices(missing))
    assert main(["talk"]) == 1
    said = capsys.readouterr().err
    assert f"there is no {missing} that can be opened: Error querying device -1" in said
    assert "--from FILE and --to FILE" in said


def test_a_loudspeaker_that_dies_ends_the_talk(
    devices: SoundDevices, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices.dies_after_s = 0.1
    monkeypatch.setattr(talk_sound, "_DEAD_S", 0.5)
    assert main(["talk", "--from", str(SUM_WAV)]) == 1
    said = capsys.readouterr().err
    assert "the loudspeaker has taken no sound for 0.5 s" in said
    assert "s of the answer were not played. Check the device, or take --to FILE." in said


def test_talk_without_sounddevice_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["talk"]) == 1
    assert "pip install 'qwen3-omni-neuron[talk]'" in capsys.readouterr().err


def test_a_player_counts_what_was_heard() -> None:
    """Underruns within an answer alone; after one it waits for 120 ms."""
    player, out = Player(), np.empty((480, 1), np.float32)
    player.fill(out)
    assert not out.any() and player.interrupt() is None
    player.push(np.full(720, 0.5, np.float32))
    player.fill(out)
    assert out.all()
    player.fill(out)
    assert np.count_nonzero(out) == 240 and player.underruns == 1
    player.push(np.full(2400, 0.5, np.float32))
    player.fill(out)
    assert not out.any()
    player.push(np.full(480, 0.5, np.float32))
    player.fill(out)
    assert out.all()
    player.latency_s = 0.01
    assert player.interrupt() == pytest.approx(1200 / 24000 - 0.01)
    player.push(np.full(240, 0.5, np.float32))
    player.end()
    player.fill(out)
    assert np.count_nonzero(out) == 240
    player.drain()
    player.fill(out)
    assert not out.any() and player.interrupt() is None and player.underruns == 1
