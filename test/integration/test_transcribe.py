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
from qwen3_omni_neuron.transcription import INSTRUCTION, Failure, Transcript, transcribe
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
    generate_text = omni.generate_text
    monkeypatch.setattr(
        omni, "generate_text", lambda *a, **k: asked.append(0) or generate_text(*a, **k)
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
