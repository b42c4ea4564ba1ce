"""Playback of speech by a notebook's player or a program."""

import shutil
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import NotInstalledError, OutputError, printable
from qwen3_omni_neuron.events.encoding import pcm16, wav_header
from qwen3_omni_neuron.events.speech_file import SpeechFile

PROGRAMS = {
    "pw-play": (),
    "paplay": (),
    "aplay": ("-q",),
    "afplay": (),
    "ffplay": ("-nodisp", "-autoexit", "-loglevel", "error"),
}
"""Programs that play a WAV file, with arguments before its name."""
_ELSE = 'Without a loudspeaker, write a file: result.save("speech.wav"), or --out speech.wav.'
_SHOWN_CHARACTERS = 300  # the part of a program's error that is shown


def player(samples: NDArray[np.float32], sample_rate: int, autoplay: bool = False) -> str:
    """Return an HTML element that plays float32 [samples], included as a WAV file.

    autoplay: begin when shown.
    """
    sound = pcm16(samples)
    data = b64encode(wav_header(sample_rate, len(sound)) + sound).decode()
    begins = " autoplay" if autoplay else ""
    return f'<audio controls{begins} src="data:audio/wav;base64,{data}"></audio>'


def play(samples: NDArray[np.float32], sample_rate: int) -> None:
    """Play float32 [samples] in [-1, 1] to their end; in a notebook return at once.

    Raises NotInstalledError without a player, OutputError if it fails.
    """
    if _in_notebook():
        from IPython.display import HTML, display

        display(HTML(player(samples, sample_rate, autoplay=True)))
        return
    _play_by_program(samples, sample_rate)


def check_player() -> None:
    """Raise NotInstalledError if `play` would find no player."""
    _program()


def _in_notebook() -> bool:
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _program() -> str:
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        raise NotInstalledError(
            f"no player found. Install one of the programs {', '.join(PROGRAMS)}. {_ELSE}"
        )
    return found


def _play_by_program(samples: NDArray[np.float32], sample_rate: int) -> None:
    found = _program()
    with TemporaryDirectory() as folder:
        file = Path(folder, "speech.wav")
        with SpeechFile(file, sample_rate) as speech:
            speech.write(samples)
        done = subprocess.run(
            [found, *PROGRAMS[Path(found).stem], str(file)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode:
        said = printable(" ".join(done.stderr.split()), _SHOWN_CHARACTERS) or "nothing"
        raise OutputError(
            f"{found} could not play the speech, status {done.returncode}: {said}. "
            f"Check the loudspeaker. {_ELSE}"
        )
