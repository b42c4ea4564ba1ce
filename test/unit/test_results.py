"""A reply's speech as a file, out of a loudspeaker and on a notebook's page; short reprs."""

import base64
import io
import re
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from qwen3_omni_neuron import SpeechResult, Timings
from qwen3_omni_neuron.errors import NotInstalledError, OutputError
from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.events.playing import PROGRAMS

RATE = 24000
SOUND = (0.5 * np.sin(np.arange(RATE) * 0.11)).astype(np.float32)
TIMINGS = Timings(0.0, 0.123456789, 0.2, 0.3, 1.0, 0.3, 5, 0, 2, 13, speech_s={"talker": 1 / 3})


def result_of(audio: np.ndarray[Any, Any] = SOUND, text: str = "eight") -> SpeechResult:
    codes = np.zeros((13, 16), np.int64)
    return SpeechResult(text, [7] * 40, codes, audio, RATE, "stop", "stop", TIMINGS, 0)


def test_raw_samples_are_saved_as_they_are(tmp_path) -> None:
    result_of().save(tmp_path / "a.pcm")
    assert (tmp_path / "a.pcm").read_bytes() == pcm16(SOUND)


def test_a_file_that_cannot_be_written_is_named(tmp_path) -> None:
    for name, said in (
        ("a.txt", r"extension \.txt, which is not supported.*\.wav, \.mp3"),
        ("a", "has no file extension"),
        ("missing/a.wav", "No such file or directory.*writable folder"),
        ("a\0.wav", "embedded null byte"),
    ):
        with pytest.raises(OutputError, match=said):
            result_of().save(tmp_path / name)
        assert not list(tmp_path.iterdir())


def test_a_reply_without_speech_is_neither_saved_nor_played(tmp_path) -> None:
    silent = result_of(SOUND[:0])
    with pytest.raises(OutputError, match=r"no speech to save.*generate_audio, stream or say"):
        silent.save(tmp_path / "a.wav")
    with pytest.raises(OutputError, match="no speech to play"):
        silent.play()
    assert not list(tmp_path.iterdir())
    assert silent._repr_html_() == "<p>eight</p>"


def test_a_page_gets_the_text_as_text_and_the_sound() -> None:
    shown = result_of(text='<script>alert("6 & 2")</script>')._repr_html_()
    assert shown.startswith(
        "<p>&lt;script&gt;alert(&quot;6 &amp; 2&quot;)&lt;/script&gt;</p><audio"
    )
    data = re.fullmatch(r'.*<audio controls src="data:audio/wav;base64,(.*)"></audio>', shown)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(data[1])), dtype="float32")
    assert rate == RATE
    np.testing.assert_allclose(samples, SOUND, atol=4e-5)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A PATH with nothing but the folder that is returned."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put_program(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_without_a_player_the_error_says_what_to_install_and_how_to_get_a_file(programs) -> None:
    with pytest.raises(NotInstalledError) as caught:
        result_of().play()
    for part in (*PROGRAMS, "result.save("):
        assert part in str(caught.value)


def test_a_program_plays_a_file_of_the_speech(programs) -> None:
    heard = programs / "heard.wav"
    copies = "import shutil, sys; assert sys.argv[1] == '-q'; "
    put_program(programs, "aplay", f"{copies}shutil.copy(sys.argv[2], {str(heard)!r})")
    result_of().play()
    samples, _ = soundfile.read(heard, dtype="float32")
    np.testing.assert_allclose(samples, SOUND, atol=4e-5)
