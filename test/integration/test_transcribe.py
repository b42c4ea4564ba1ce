"""`transcribe`, as a person calls it. The weights are random: the words are noise, but the same."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tqdm

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.errors import ClosedError, OptionError
from qwen3_omni_neuron.events import Finished, TextDelta
from qwen3_omni_neuron.transcription import (
    INSTRUCTION,
    Failure,
    GrowingWindows,
    Transcript,
    stream_transcript,
    transcribe,
    transcribe_windows,
    windows,
)
from testing.media_cases import QUESTION_WAV

TOKENS = 6
TIMES = ("audio_s", "ttft_s", "total_s", "rtf")
SHORT = ["--dtype", "float32", "--max-new-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five files of noise, of several rates and lengths, the longest first."""
    folder = tmp_path_factory.mktemp("clips")
    random = np.random.default_rng(0)
    files = []
    for number, rate in enumerate((16000, 24000, 8000, 16000, 44100)):
        samples = random.uniform(-0.5, 0.5, int(rate * (1.6 - 0.3 * number)))
        files.append(folder / f"clip {number}.{'flac' if number == 1 else 'wav'}")
        soundfile.write(files[-1], samples, rate)
    return files


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that can't be transcribed, by what is said of them."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "broken.wav").write_bytes(b"RIFF, or so")
    soundfile.write(folder / "empty.wav", np.zeros(0), 16000)
    soundfile.write(folder / "long.wav", np.zeros(16000 * 30), 16000)
    return {
        "does not exist": folder / "missing.wav",
        "can't be read as audio": folder / "broken.wav",
        "lasts 0.000 s": folder / "empty.wav",
        "larger context_length": folder / "long.wav",
    }


def text_of(omni: Qwen3Omni, file: Path) -> str:
    """The API's answer to the same question."""
    content = [{"type": "audio", "audio": file}, {"type": "text", "text": INSTRUCTION}]
    messages = [{"role": "user", "content": content}]
    options = {"thinker_do_sample": False, "thinker_max_new_tokens": TOKENS}
    return omni.generate_text(messages, **options).text


def test_one_file_gives_its_text_alone(
    checkpoint: Path, omni: Qwen3Omni, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", str(QUESTION_WAV), "--model", str(checkpoint), *SHORT]) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of(omni, QUESTION_WAV) + "\n"
    assert printed.err == ""


@pytest.mark.parametrize("concurrency", [1, 3])
def test_several_files_are_a_line_each_in_their_order_however_many_at_once(
    checkpoint: Path,
    omni: Qwen3Omni,
    clips: list[Path],
    capsys: pytest.CaptureFixture[str],
    concurrency: int,
) -> None:
    files = [str(file) for file in clips]
    model = ["--model", str(checkpoint), "--concurrency", str(concurrency)]
    assert main(["transcribe", *files, *model, *SHORT]) == 0
    texts = [" ".join(text_of(omni, file).split()) for file in clips]
    assert len(set(texts)) > 1, "every clip says the same: the order can't be told"
    expected = [f"{file}\t{text}" for file, text in zip(files, texts, strict=True)]
    assert capsys.readouterr().out.split("\n") == [*expected, ""]


def test_json_lines_have_text_and_times(
    checkpoint: Path, omni: Qwen3Omni, clips: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(file) for file in clips[:2]]
    assert main(["transcribe", *files, "--json", "--model", str(checkpoint), *SHORT]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == files
    for file, line in zip(clips[:2], lines, strict=True):
        assert set(line) == {"file", "text", "finish_reason", *TIMES}
        assert line["text"] == text_of(omni, file)
        assert line["audio_s"] == pytest.approx(soundfile.info(file).duration, abs=1e-3)
        assert 0 < line["ttft_s"] < line["total_s"]
        assert line["rtf"] == pytest.approx(line["total_s"] / line["audio_s"])
        assert line["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("as_json", [False, True])
def test_bad_files_are_reported_and_the_others_transcribed(
    checkpoint: Path,
    clips: list[Path],
    bad: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    files = [str(file) for file in (clips[3], *bad.values(), clips[4])]
    model = ["--model", str(checkpoint), "--context-length", "128", "--concurrency", "2"]
    assert main(["transcribe", *files, *model, *SHORT, *["--json"] * as_json]) == 1
    printed = capsys.readouterr()
    reports = printed.err.splitlines()
    assert len(reports) == len(bad)
    for (said, file), report in zip(bad.items(), reports, strict=True):
        assert report.startswith(f"qwen3-omni-neuron: {file}: ")
        assert said in report
    lines = printed.out.splitlines()
    if not as_json:
        assert [line.split("\t")[0] for line in lines] == [files[0], files[-1]]
        return
    outcomes = [json.loads(line) for line in lines]
    assert [outcome["file"] for outcome in outcomes] == files
    for said, outcome in zip(bad, outcomes[1:-1], strict=True):
        assert set(outcome) == {"file", "error"}
        assert said in outcome["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere"], "does not exist"),
        (["--concurrency", "0"], "1 or more, got 0"),
        (["--max-new-tokens", "0"], "1 or more, got 0"),
        (["--context-length", "1"], "context_length is 2 to"),
    ],
)
def test_what_concerns_every_file_ends_the_command(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    model = [] if "--model" in arguments else ["--model", str(checkpoint)]
    assert main(["transcribe", str(QUESTION_WAV), str(QUESTION_WAV), *model, *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_terminal_sees_how_far_it_is(
    checkpoint: Path,
    clips: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would outlive the test
    files = [str(file) for file in clips[:2]]
    assert main(["transcribe", *files, "--model", str(checkpoint), *SHORT]) == 0
    printed = capsys.readouterr()
    assert "2/2" in printed.err
    assert [line.split("\t")[0] for line in printed.out.splitlines()] == files


@pytest.mark.usefixtures("warm_commands")
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(
    checkpoint: Path, clips: list[Path]
) -> None:
    verb = [sys.executable, "-m", "qwen3_omni_neuron.cli", "transcribe", "--json", *SHORT]
    files = [str(file) for file in clips]
    with subprocess.Popen(
        [*verb, "--model", str(checkpoint), *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        errors = command.stderr.read()
    assert command.returncode == 1
    assert "nobody reads the output any more" in errors
    assert "Traceback" not in errors


def test_an_iterator_that_is_closed_begins_no_other_file(
    omni: Qwen3Omni, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    stream_text = omni.stream_text
    monkeypatch.setattr(
        omni, "stream_text", lambda *a, **k: asked.append(0) or stream_text(*a, **k)
    )
    with closing(transcribe(omni, clips * 20, max_new_tokens=TOKENS)) as outcomes:
        assert isinstance(next(outcomes), Transcript)
    assert len(asked) < len(clips * 20)


def test_the_library_tells_failures_from_mistakes(checkpoint: Path, clips: list[Path]) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=1) as omni:
        (missing,) = transcribe(omni, [Path("missing.wav")])
        assert isinstance(missing, Failure)
        with pytest.raises(OptionError, match="thinker_max_new_tokens"):
            list(transcribe(omni, clips, max_new_tokens=0))
    with pytest.raises(ClosedError):
        list(transcribe(omni, clips))


def test_a_streamed_transcript_is_that_of_the_whole(omni: Qwen3Omni, clips: list[Path]) -> None:
    events = list(stream_transcript(omni, {"audio": clips[1].read_bytes()}, None, TOKENS))
    assert isinstance(events[-1], Finished)
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    assert len(texts) > 1
    assert "".join(texts) == events[-1].result.text == text_of(omni, clips[1])


@pytest.mark.parametrize("seconds", [0.5, 7.99, 8.0, 8.01, 9.5, 16.0, 40.3])
def test_windows_are_cut_in_silence_and_none_is_short(seconds: float) -> None:
    random = np.random.default_rng(0)
    samples = random.uniform(-0.5, 0.5, int(16000 * seconds)).astype(np.float32)
    pauses = [int(16000 * second) for second in (6.9, 13.2, 20.0, 27.5, 34.0)]
    for pause in pauses:
        samples[pause : pause + 1600] = 0
    found = windows(samples)
    assert [start for start, _ in found[1:]] == [end for _, end in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, len(samples))
    assert all(end - start <= 8 * 16000 for start, end in found)
    if len(found) > 1:
        assert all(end - start >= 16000 for start, end in found)
    if seconds > 8.5:
        assert all(any(p <= end <= p + 1600 for p in pauses) for _, end in found[:-1])


@pytest.mark.parametrize("seconds", [0.5, 8.01, 8.99, 9.0, 17.5, 40.3])
@pytest.mark.parametrize("piece_s", [0.02, 0.7, 9.3, 15.4, 15.8, 60.0])
@pytest.mark.parametrize("last", [1.0, 0.1])
@pytest.mark.diagonal
def test_windows_of_sound_that_arrives_are_those_of_the_whole(
    seconds: float, piece_s: float, last: float
) -> None:
    """None of them is known later than after 9 s of its own.

    Sound that gets quieter is cut as late as may be: a window that is taken too early is seen.
    """
    samples = np.random.default_rng(2).uniform(-0.5, 0.5, int(16000 * seconds)).astype(np.float32)
    samples *= np.linspace(1, last, len(samples), dtype=np.float32)
    growing, found, piece = GrowingWindows(), [], int(16000 * piece_s)
    for start in range(0, len(samples), piece):
        found += growing.push(samples[start : start + piece])
        assert growing.held < 9 * 16000
    early = len(found)
    found += growing.finish()
    whole = [samples[first:last] for first, last in windows(samples)]
    for made, wanted in zip(found, whole, strict=True):
        assert np.array_equal(made, wanted)
    assert growing.length == len(samples)
    assert len(found) - early <= 1 + (len(samples) - sum(map(len, found[:early])) > 8 * 16000)


def test_a_segment_is_the_transcript_of_its_window(omni: Qwen3Omni) -> None:
    random = np.random.default_rng(1)
    samples = random.uniform(-0.5, 0.5, 16000 * 17).astype(np.float32)
    audio = {"audio": samples, "sampling_rate": 16000}
    bounds = windows(samples)
    assert len(bounds) > 2
    for concurrency in (1, 3):
        found = list(transcribe_windows(omni, audio, None, concurrency, TOKENS))
        assert [(s.start_s, s.end_s) for s in found] == [(a / 16000, b / 16000) for a, b in bounds]
        for segment, (start, end) in zip(found, bounds, strict=True):
            alone = {"audio": samples[start:end], "sampling_rate": 16000}
            (*_, last) = stream_transcript(omni, alone, None, TOKENS)
            assert isinstance(last, Finished)
            assert segment.text == last.result.text
