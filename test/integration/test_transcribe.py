"""`transcribe`, as a person calls it. The weights are random: the words are noise, but the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.errors import AudioError, ClosedError, ExitStatus, OptionError
from qwen3_omni_neuron.events import Finished, TextDelta
from qwen3_omni_neuron.options import INSTRUCTION
from qwen3_omni_neuron.prompt.media import windows as windows_module
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.windows import GrowingWindows
from qwen3_omni_neuron.transcription import (
    Failure,
    Segment,
    Transcript,
    stream_transcript,
    stream_window,
    transcribe,
)
from testing.media_cases import QUESTION_WAV
from testing.scripted_model import ScriptedModel

TOKENS = 6
TIMES = ("audio_s", "ttft_s", "total_s", "rtf")
SHORT = ["--dtype", "float32", "--max-new-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[Path]:
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
def bad(tmp_path_factory) -> dict[str, Path]:
    """Files that can't be transcribed, by what is said of them."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "broken.wav").write_bytes(b"RIFF, or so")
    soundfile.write(folder / "empty.wav", np.zeros(0), 16000)
    soundfile.write(folder / "long.wav", np.random.default_rng(4).uniform(-1, 1, 16000 * 30), 16000)
    return {
        "does not exist": folder / "missing.wav",
        "is of an unknown format": folder / "broken.wav",
        "no sound that can be": folder / "empty.wav",
        "load with a larger": folder / "long.wav",
    }


def text_of(omni: Qwen3Omni, file: Path) -> str:
    """The API's answer to the same question."""
    content = [{"type": "audio", "audio": file}, {"type": "text", "text": INSTRUCTION}]
    messages = [{"role": "user", "content": content}]
    options = {"thinker_do_sample": False, "thinker_max_new_tokens": TOKENS}
    return omni.generate_text(messages, **options).text


def test_one_file_gives_its_text_alone(checkpoint, omni, capsys) -> None:
    assert (
        main(["transcribe", str(QUESTION_WAV), "--model", str(checkpoint), *SHORT])
        == ExitStatus.CUT
    )
    printed = capsys.readouterr()
    assert printed.out == text_of(omni, QUESTION_WAV) + "\n"
    assert printed.err.startswith(f"qwen3-omni-neuron: {QUESTION_WAV}: the text is incomplete: ")
    assert printed.err.count("\n") == 1


def test_several_files_are_a_line_each_in_their_order_however_many_at_once(
    checkpoint, omni, clips, capsys
) -> None:
    for concurrency in (1, 3):
        files = [str(file) for file in clips]
        model = ["--model", str(checkpoint), "--concurrency", str(concurrency)]
        assert main(["transcribe", *files, *model, *SHORT]) == ExitStatus.CUT
        texts = [" ".join(text_of(omni, file).split()) for file in clips]
        assert len(set(texts)) > 1, "every clip says the same: the order can't be told"
        expected = [f"{file}\t{text}" for file, text in zip(files, texts, strict=True)]
        assert capsys.readouterr().out.split("\n") == [*expected, ""]


def test_json_lines_have_text_and_times(checkpoint, omni, clips, capsys) -> None:
    files = [str(file) for file in clips[:2]]
    assert (
        main(["transcribe", *files, "--json", "--model", str(checkpoint), *SHORT]) == ExitStatus.CUT
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == files
    for file, line in zip(clips[:2], lines, strict=True):
        assert set(line) == {"file", "text", "finish_reason", "warnings", *TIMES}
        assert line["text"] == text_of(omni, file)
        assert line["audio_s"] == pytest.approx(soundfile.info(file).duration, abs=1e-3)
        assert 0 < line["ttft_s"] < line["total_s"]
        assert line["rtf"] == pytest.approx(line["total_s"] / line["audio_s"])
        assert (line["finish_reason"], line["warnings"]) == ("length", [])


@pytest.mark.parametrize("as_json", [False, True])
def test_bad_files_are_reported_and_the_others_transcribed(
    checkpoint, clips, bad, capsys, as_json
) -> None:
    files = [str(file) for file in (clips[3], *bad.values(), clips[4])]
    model = ["--model", str(checkpoint), "--context-length", "112", "--concurrency", "2"]
    assert main(["transcribe", *files, *model, *SHORT, *["--json"] * as_json]) == 1
    printed = capsys.readouterr()
    reports = printed.err.splitlines()
    cut = [report for report in reports if "the text is incomplete" in report]
    assert [report.split(": ")[1] for report in cut] == [files[0], files[-1]]
    reports = [report for report in reports if report not in cut]
    assert len(reports) == len(bad)
    for (said, file), report in zip(bad.items(), reports, strict=True):
        assert report.startswith(f"qwen3-omni-neuron: {file}: ")
        assert said in report
    assert "--context-length" in printed.err and "context_length" not in printed.err
    lines = printed.out.splitlines()
    if not as_json:
        assert [line.split("\t")[0] for line in lines] == [files[0], files[-1]]
        return
    outcomes = [json.loads(line) for line in lines]
    assert [outcome["file"] for outcome in outcomes] == files
    for said, outcome in zip(bad, outcomes[1:-1], strict=True):
        assert set(outcome) == {"file", "error"}
        assert said in outcome["error"]


def test_the_library_tells_failures_from_mistakes(checkpoint, clips) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=1) as omni:
        (missing,) = transcribe(omni, [Path("missing.wav")])
        assert isinstance(missing, Failure)
        with pytest.raises(AudioError, match="does not exist"):
            omni.transcribe("missing.wav")
        made = omni.transcribe(soundfile.read(clips[0]), max_new_tokens=TOKENS)
        assert made.text == omni.transcribe(clips[0].read_bytes(), max_new_tokens=TOKENS).text
        with pytest.raises(OptionError, match="thinker_max_new_tokens"):
            list(transcribe(omni, clips, max_new_tokens=0))
    with pytest.raises(ClosedError):
        list(transcribe(omni, clips))


def speech(*lengths: float) -> np.ndarray:
    """Noise of these lengths in seconds, with a pause of 2 s after each."""
    random, parts = np.random.default_rng(1), []
    for length in lengths:
        sound = random.uniform(-0.5, 0.5, round(16000 * length))
        parts += [sound.astype(np.float32), np.zeros(32000, np.float32)]
    return np.concatenate(parts)


def test_a_segment_is_the_transcript_of_its_window(omni) -> None:
    audio = {"audio": speech(12, 3), "sampling_rate": 16000}
    growing = GrowingWindows()
    wanted = growing.push(audio["audio"]) + growing.finish()
    assert len(wanted) == 3
    events = stream_transcript(omni, audio, None, TOKENS, timed=True)
    found = [event for event in events if isinstance(event, Segment)]
    for segment, window in zip(found, wanted, strict=True):
        assert (segment.start_s, segment.end_s) == (window.start_s, window.end_s)
        with stream_window(omni, window, INSTRUCTION, TOKENS) as stream:
            (*_, last) = stream
        assert isinstance(last, Finished)
        assert (segment.text, segment.token_ids) == (last.result.text, last.result.token_ids)
        assert segment.finish_reason == "length"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_long_file_is_transcribed_whole_in_windows(omni, tmp_path, concurrency) -> None:
    long, short = tmp_path / "long.wav", tmp_path / "short.wav"
    soundfile.write(long, speech(35, 3), 16000)
    soundfile.write(short, speech(2), 16000)
    growing = GrowingWindows(30.0, timed=False)
    windows = growing.push(load_waveform({"audio": long}, 16000, "audio")) + growing.finish()
    assert len(windows) == 3
    texts = []
    for window in windows:
        with stream_window(omni, window, INSTRUCTION, TOKENS) as stream:
            texts += [event.result.text for event in stream if isinstance(event, Finished)]
    first, second, third = transcribe(omni, [long, short, long], None, concurrency, TOKENS)
    assert isinstance(first, Transcript) and isinstance(second, Transcript)
    assert isinstance(third, Transcript)
    assert first.text == third.text == " ".join(texts)
    assert second.text == text_of(omni, short)
    assert first.audio_s == 42.0
    assert 0 < first.ttft_s < first.total_s == pytest.approx(first.rtf * 42)
    deltas = stream_transcript(omni, {"audio": long}, None, TOKENS)
    assert "".join(e.text for e in deltas if isinstance(e, TextDelta)) == first.text


def test_text_comes_while_the_audio_is_read() -> None:
    """Two windows are read ahead for each that is transcribed: an hour is never in memory."""
    read = []

    def blocks() -> Iterator[np.ndarray]:
        for number in range(9):
            read.append(number)
            yield speech(58)

    model: Any = ScriptedModel(["Hi"])
    item = {"audio": blocks(), "sampling_rate": 16000}
    events = stream_transcript(model, item, timed=True)
    next(events)
    assert len(read) == 1
    assert sum(isinstance(event, Segment) for event in events) > 9 * 58 / 8


def test_a_limit_that_ends_one_window_is_the_transcripts(tmp_path) -> None:
    soundfile.write(tmp_path / "long.wav", speech(20, 20), 16000)
    reasons = iter(["length", "stop", "stop", "stop"])

    class Cut(ScriptedModel):
        def stream_text(self, messages: Any, **options: Any) -> Any:
            self.reason = next(reasons)
            return super().stream_text(messages, **options)

    model: Any = Cut(["Hi"])
    first, second = transcribe(model, 2 * [tmp_path / "long.wav"], max_new_tokens=7)
    assert isinstance(first, Transcript) and isinstance(second, Transcript)
    assert (first.text, first.finish_reason, second.finish_reason) == ("Hi Hi", "length", "stop")
    assert {options["thinker_max_new_tokens"] for _, options in model.asked} == {7}


def test_warnings_of_reading_are_the_transcripts(monkeypatch, capsys) -> None:
    blocks = windows_module.waveform_blocks

    def warning_blocks(*given: Any, warn: Any, **named: Any) -> Any:
        warn("audio: the file is cut short.")
        return blocks(*given, warn=warn, **named)

    monkeypatch.setattr(windows_module, "waveform_blocks", warning_blocks)
    (outcome,) = transcribe(ScriptedModel(["Hi"]), [QUESTION_WAV])  # type: ignore[arg-type]
    assert isinstance(outcome, Transcript)
    assert outcome.warnings == ["audio: the file is cut short."]
    assert main(["transcribe", str(QUESTION_WAV), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"qwen3-omni-neuron: {QUESTION_WAV}: the file is cut short.\n"
    assert json.loads(printed.out)["warnings"] == outcome.warnings
