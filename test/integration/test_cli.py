"""The command line, as a person calls it."""

import json
import os
import re
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import soundfile

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.errors import ExitStatus, OutputError
from qwen3_omni_neuron.events import playing
from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.events.speech_file import SUFFIXES, SpeechFile
from qwen3_omni_neuron.serving.server import Server
from testing.command_examples import examples
from testing.imports import ROOT
from testing.made_videos import make_video
from testing.media_cases import QUESTION_WAV, noise_image, text, user
from testing.specs import compiled_here

WAV = str(QUESTION_WAV)
URL = "https://media.example/a.wav"
NO_FORMAT = f"End the name with one of {SUFFIXES}."
SHORT = [
    *("--thinker-max-new-tokens", "3", "--talker-max-new-tokens", "4", "--seed", "1"),
    *("--thinker-do-sample", "false", "--talker-do-sample", "false"),
]


def test_speak_writes_text_and_a_wav(checkpoint, tmp_path, capsys) -> None:
    out = tmp_path / "o.wav"
    status = main(
        [
            *("speak", "And this?", "--audio", str(QUESTION_WAV), "--system", "Be brief."),
            *("--speaker", "chelsie", "--out", str(out), "--model", str(checkpoint), *SHORT),
        ]
    )
    printed = capsys.readouterr()
    assert status == ExitStatus.CUT
    for limit in ("text after 3 tokens: --thinker-max", "speech after 0.22 s: --talker-max"):
        assert f"qwen3-omni-neuron: a limit ended the {limit}-new-tokens, or" in printed.err
    assert printed.out.strip()
    for figure in ("TTFT", "TTFB", "RTF", "3 frames", "seed 1"):
        assert figure in printed.err
    assert "whole model" not in printed.err  # this one says nothing of itself
    info = soundfile.info(out)
    assert (info.samplerate, info.channels, info.frames) == (24000, 1, 3 * 1920 - 555)
    assert [f.name for f in tmp_path.iterdir()] == ["o.wav"]


def test_speak_takes_media_in_the_order_they_are_named(omni, checkpoint, tmp_path, capsys) -> None:
    files = {"image": tmp_path / "a.png", "video": tmp_path / "b.mp4", "audio": QUESTION_WAV}
    noise_image(96, 64).save(files["image"])
    files["video"].write_bytes(make_video(audio="aac"))
    items = [{"type": kind, kind: str(files[kind])} for kind in ("video", "image", "audio")]
    result = omni.generate_text(
        [user(*items, text("And this?"))],
        use_audio_in_video=True,
        thinker_max_new_tokens=3,
        thinker_do_sample=False,
    )
    named = [f"--{kind}={files[kind]}" for kind in ("video", "image", "audio")]
    options = ["--use-audio-in-video=true", "--dtype=float32", f"--out={tmp_path / 'o.wav'}"]
    model = ["--model", str(checkpoint)]
    assert main(["speak", "And this?", *named, *options, *model, *SHORT]) == ExitStatus.CUT
    assert capsys.readouterr().out == result.text + "\n"


@pytest.mark.usefixtures("warm_commands")
def test_the_speech_goes_to_stdout_as_raw_samples(checkpoint, tmp_path) -> None:
    """For a pipe into a player: 16-bit little-endian PCM, those of the WAV, and nothing else.

    The environment names the model.
    """
    speak = ["-m", "qwen3_omni_neuron", "speak", "Hello", *SHORT]
    piped = subprocess.run(
        [sys.executable, *speak, "--out", "-", "--chunk-frames", "1,2"],
        cwd=tmp_path,
        env={**os.environ, "QWEN3_OMNI_MODEL": str(checkpoint)},
        capture_output=True,
        check=False,
    )
    assert piped.returncode == ExitStatus.CUT, piped.stderr.decode()
    assert b"TTFB" in piped.stderr
    assert not list(tmp_path.iterdir())
    out = ["--out", str(tmp_path / "o.wav"), "--model", str(checkpoint)]
    assert main([*speak[2:], *out]) == ExitStatus.CUT
    samples, _ = soundfile.read(tmp_path / "o.wav", dtype="int16")
    assert np.abs(np.frombuffer(piped.stdout, "<i2") - samples).max() <= 1


def test_the_wav_grows_beside_its_path_while_the_speech_comes(tmp_path) -> None:
    out = tmp_path / "o.wav"
    seen = []
    with SpeechFile(out, 24000) as wav:
        for _ in range(3):
            wav.write(np.full(1920, 0.25, np.float32))
            (part,) = tmp_path.iterdir()
            seen.append(part.stat().st_size)
    assert seen == [44 + 3840 * n for n in (1, 2, 3)]
    assert [f.name for f in tmp_path.iterdir()] == ["o.wav"]
    assert soundfile.info(out).frames == 3 * 1920


def test_the_file_has_the_permissions_of_new_files(tmp_path) -> None:
    out, other = tmp_path / "o.wav", tmp_path / "other"
    other.touch()
    with SpeechFile(out, 24000) as wav:
        wav.write(np.zeros(1920, np.float32))
    assert out.stat().st_mode == other.stat().st_mode


def test_speech_that_no_encoder_takes_leaves_no_file(tmp_path) -> None:
    with (
        pytest.raises(OutputError, match="Opus only supports"),
        SpeechFile(tmp_path / "o.opus", 44100),
    ):
        pass
    assert not list(tmp_path.iterdir())


KINDS = {
    **{"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16")},
    **{"mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")},
}


@pytest.mark.parametrize("suffix", SUFFIXES.split(", "))
def test_the_name_of_the_output_says_its_format(tmp_path, suffix) -> None:
    out = tmp_path / f"Speech.{suffix[1:].upper()}"
    samples = np.sin(np.arange(36_000, dtype=np.float32) / 9) / 2
    with SpeechFile(out, 24000) as file:
        for first in range(0, len(samples), 1920):
            file.write(samples[first : first + 1920])
    if suffix == ".pcm":
        assert out.read_bytes() == pcm16(samples)
        return
    info = soundfile.info(out)
    assert (info.format, info.subtype) == KINDS["opus" if suffix == ".ogg" else suffix[1:]]
    assert (info.samplerate, info.channels, info.frames) == (24000, 1, len(samples))
    if suffix in (".wav", ".flac"):
        assert soundfile.read(out, dtype="int16")[0].tobytes() == pcm16(samples)


def test_a_failure_is_one_line_before_the_model_is_loaded_and_leaves_no_file(
    checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Qwen3Omni, "load", None)
    for arguments, said in (
        ([], "nothing to answer"),
        (["Hello", "--speaker", "Bob"], "--speaker: unknown speaker 'Bob'. This checkpoint has"),
        (["--audio", "/nowhere.wav"], "--audio /nowhere.wav: the file does not exist"),
        (["--image", WAV], f"{WAV}: the file is sound (WAV), not an image. Give it with --audio."),
        (["--video", __file__], f"--video {__file__}: the file is of an unknown format"),
        (["--audio", __file__, "--system", "a"], f"--audio {__file__}: the file is of an"),
        (
            ["Hello", "--thinker-min-new-tokens", "5", "--thinker-max-new-tokens", "4"],
            "--thinker-min-new-tokens is 5, more than --thinker-max-new-tokens, 4.",
        ),
        (["Hello", "--out", "/nowhere/at/all.wav"], "can't be written"),
        (["Hello", "--out", "."], "--out . is a folder"),
        (
            ["Hello", "--out", "o.m4a"],
            f"--out o.m4a has the extension .m4a, which is not supported. {NO_FORMAT}",
        ),
        (["Hello", "--out", "speech"], f"speech has no file extension. {NO_FORMAT}"),
        (["Hello", "--model", "/nowhere"], "does not exist"),
        ([" "], "the text is blank: give at least one word."),
        ([WAV], f"(WAV), not a text. Did you mean speak --audio {WAV}?"),
        (["--audio", URL], f"--audio {URL}: the file is a URL, which is not fetched here. Downl"),
        (["say", " "], "the text is blank: give at least one word."),
        (["say", WAV], "not a text. Did you mean speak --audio"),
        (["transcribe", URL], f": {URL}: the file is a URL, which is not fetched here. Downl"),
    ):
        model = [] if "--model" in arguments else ["--model", str(checkpoint)]
        verb = [] if arguments[:1] in (["say"], ["transcribe"]) else ["speak"]
        assert main([*verb, *arguments, *model]) == 1
        message = capsys.readouterr().err
        assert said in message
        assert message.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_a_sound_longer_than_the_context_is_refused_with_what_to_do(capsys, tmp_path) -> None:
    two_hours = tmp_path / "two_hours.wav"
    soundfile.write(two_hours, np.zeros(7_200_000, np.int16), 1000)
    assert main(["speak", "--audio", str(two_hours)]) == ExitStatus.FAILED
    said = capsys.readouterr().err
    assert "load with a larger --context-length, or transcribe it: that has no limit" in said


@pytest.mark.parametrize("verb", ["speak", "speak --audio", "transcribe"])
def test_a_verb_reads_stdin(verb, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = b"three five\n" if verb == "speak" else QUESTION_WAV.read_bytes()
    printed = []
    for argument in ("three five" if verb == "speak" else str(QUESTION_WAV), "-"):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(content)))
        assert main([*verb.split(), argument, *["--seed", "0"] * (verb != "transcribe")]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_without_a_model_it_says_how_to_name_one(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("QWEN3_OMNI_MODEL", raising=False)
    assert main(["compile", "--out", str(tmp_path)]) == 1
    assert "--model PATH, or set QWEN3_OMNI_MODEL" in capsys.readouterr().err


INTRODUCED = (
    "This is a small model for trying things out: it knows 30 words. "
    'Ask it: "who are you", "what is 2 + 3?", "say red blue". '
    "The whole model: --model Qwen/Qwen3-Omni-30B-A3B-Instruct, "
    "in 24 GB of memory with --dtype int4.\n"
)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let stderr be a terminal, of a user who has seen nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


SAY = ["say", "hello", "--seed", "0"]


def test_a_user_is_told_once_that_the_model_is_a_small_one(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("QWEN3_OMNI_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    on_a_terminal(monkeypatch, tmp_path / "cache")
    assert main([*SAY, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(SAY) == 0
    assert capsys.readouterr().err.startswith(INTRODUCED)
    assert main(SAY) == 0
    assert "30 words" not in capsys.readouterr().err


def test_speech_gets_a_new_name_unless_it_has_one(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("speech.wav", "speech-2.wav", "speech-3.wav"):
        assert main(SAY) == 0
        said = capsys.readouterr().err
        assert f"-> {name}\n" in said
        for term in ("(to the first text)", "(to the first sound)", "(below 1: faster than real"):
            assert term in said
    Path("speech-2.wav").write_bytes(b"earlier")
    assert main([*SAY, "--out", "speech-2.wav"]) == 0
    assert soundfile.info("speech-2.wav").frames == soundfile.info("speech.wav").frames
    assert len(list(tmp_path.iterdir())) == 3


def test_a_reply_as_a_line_of_json(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["speak", "two plus three", "--seed", "7", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    line = json.loads(printed.out)
    assert (line["text"], line["file"], line["seed"]) == ("five", "speech.wav", 7)
    assert line["warnings"] == [] and line["thinker_finish_reason"] == "stop"
    assert line["timings"]["ttfb_s"] > line["timings"]["ttft_s"] > 0
    assert line["audio_s"] == pytest.approx(soundfile.info("speech.wav").duration)


def test_a_reply_is_played_and_written_if_it_has_a_name(capsys, monkeypatch, tmp_path) -> None:
    played: list[int] = []
    monkeypatch.setattr(playing, "check_player", lambda: None)
    monkeypatch.setattr(playing, "play", lambda samples, rate: played.append(len(samples)))
    monkeypatch.chdir(tmp_path)
    assert main([*SAY, "--play"]) == 0
    assert "->" not in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main([*SAY, "--play", "--out", "a.wav"]) == 0
    assert played == [soundfile.info("a.wav").frames] * 2


def run_examples(verb: str, printed: pytest.CaptureFixture[bytes], **names: str) -> str:
    """Run the examples of a verb's help. Returns the last line that they print.

    names: what stands for each word in capitals.
    """
    for words in examples(verb):
        given = re.compile("|".join(names) or "$.")
        assert main([given.sub(lambda found: names[found[0]], w) for w in words]) == 0, words
    return printed.readouterr().out.decode(errors="replace").rstrip().rpartition("\n")[2]


def test_the_examples_of_the_help_run(
    checkpoint,
    tmp_path,
    capsysbinary,  # one of them plays samples to stdout
    monkeypatch,
) -> None:
    """All examples but those of `verify`, which has tests of their own."""
    monkeypatch.delenv("QWEN3_OMNI_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("question.wav").write_bytes(QUESTION_WAV.read_bytes())
    Path("answer.wav").write_bytes(QUESTION_WAV.read_bytes())
    Path("keys.txt").write_text("a-key-of-the-operator\n")
    monkeypatch.setattr(sys, "stdin", StringIO("seven red goodbye\n"))
    monkeypatch.setattr(Server, "run", lambda server: 0)
    for verb in ("speak", "say", "transcribe", "serve", "doctor"):
        run_examples(verb, capsysbinary)
    for name in ("answer.mp3", "said.mp3", "speech.wav"):
        assert Path(name).exists()
    folders = {"CHECKPOINT": str(checkpoint)}
    with compiled_here():
        run_examples("compile", capsysbinary, **folders)
    run_examples("inspect", capsysbinary, **folders)
    assert not Path("CHECKPOINT").exists()


def test_every_exit_status_stands_in_the_table_of_the_documents() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    table = text.split("| status | meaning |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [str(int(s)) for s in ExitStatus]
