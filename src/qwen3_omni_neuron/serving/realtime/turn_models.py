"""Models on the CPU that listen for turns.

Silero's gives the probability of speech in a frame of 32 ms. Smart Turn v3.2 tells whether a user
who pauses has said all, by the sound of the turn.
"""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel

RATE = 16000
FRAME_SAMPLES = 512
HEARD_SAMPLES = 8 * RATE
"""Samples of a turn's end by which is judged whether it is complete."""
INSTALL = "pip install 'qwen3-omni-neuron[realtime]'"
_CONTEXT_SAMPLES = 64  # samples of the frame before, which Silero's model gets again
_COMPLETE = 0.5  # probability from which on a turn is complete
_VARIANCE = 1e-7  # keeps silence from a division by zero


def can_detect() -> bool:
    """Return whether the packages of the extra `realtime` are installed."""
    return find_spec("onnxruntime") is not None and _vad_file() is not None


def can_judge() -> bool:
    """Return whether the packages of the extra `smart-turn` are installed."""
    return find_spec("onnxruntime") is not None and _judge_file() is not None


def judges(omni: Qwen3Omni) -> bool:
    """Return whether the end of a turn is judged by its meaning with a model."""
    return can_judge() and not omni.turns_by_silence


class SileroVad:
    """Voice activity model with the state of one stream.

    Source: silero-vad utils_vad.py, OnnxWrapper.
    """

    def __init__(self) -> None:
        self._model = _loaded(_vad_file())
        self._state = np.zeros((2, 1, 128), np.float32)
        self._frame = np.zeros((1, _CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)

    def __call__(self, frame: NDArray[np.float32]) -> float:
        """Return the probability of speech in a frame. frame: float32 [FRAME_SAMPLES] at RATE."""
        self._frame[0, :_CONTEXT_SAMPLES] = self._frame[0, -_CONTEXT_SAMPLES:]
        self._frame[0, _CONTEXT_SAMPLES:] = frame
        given = {"input": self._frame, "state": self._state, "sr": np.array(RATE, np.int64)}
        output, self._state = self._model.run(None, given)
        return float(output[0, 0])


def probability(turn: NDArray[np.float32]) -> float:
    """Return the probability that a turn is complete. Takes about 0.1 s of one core.

    turn: float32 [samples] at RATE, from its beginning to the pause; of a longer one than
    HEARD_SAMPLES the end is heard, a shorter one is padded with zeros in front.
    Source: the class of pipecat-ai that runs the same file.
    """
    heard = turn[-HEARD_SAMPLES:]
    heard = np.concatenate((np.zeros(HEARD_SAMPLES - len(heard), np.float32), heard))
    heard = (heard - heard.mean()) / np.sqrt(heard.var() + np.float32(_VARIANCE))
    features = log_mel(heard, _mel_settings()).numpy()[None]  # [1, 80, 800]
    (output,) = load_judge().run(None, {"input_features": features})
    return float(output[0, 0])


def is_complete(turn: NDArray[np.float32]) -> bool:
    """Return whether a turn is more likely complete than not; see `probability`."""
    return probability(turn) > _COMPLETE


def load_judge() -> Any:
    """Load Smart Turn's model, once for all streams."""
    return _loaded(_judge_file())


@functools.cache
def _mel_settings() -> MelSettings:
    return MelSettings.of({"feature_size": 80, "sampling_rate": RATE})


def _vad_file() -> Path | None:
    return _file("silero_vad", "data/silero_vad.onnx")


def _judge_file() -> Path | None:
    return _file("pipecat", "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx")


def _file(package: str, name: str) -> Path | None:
    """Return a package's file, None if it is not there.

    The package is not imported: Silero's would load its training dependencies, too.
    """
    found = find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


@functools.cache
def _loaded(file: Path | None) -> Any:
    """Load a model, once for all streams. Its `run` may be called by several threads."""
    import onnxruntime

    assert file is not None, "the package is installed"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
