"""Smart Turn v3.2 on the CPU: whether a user who pauses has said all, by the sound of the turn."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel

RATE = 16000
HEARD_SAMPLES = 8 * RATE  # the model hears the last 8 s of a turn
_COMPLETE = 0.5  # probability from which on the turn is complete
_FILE = Path("audio", "turn", "smart_turn", "data", "smart-turn-v3.2-cpu.onnx")
_VARIANCE = 1e-7  # keeps silence from a division by zero


def is_installed() -> bool:
    """Return whether the packages of the extra `smart-turn` are installed."""
    return find_spec("onnxruntime") is not None and _file() is not None


def judges(omni: Qwen3Omni) -> bool:
    """Return whether the end of a turn is judged by its meaning with a model."""
    return is_installed() and not omni.turns_by_silence


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
    (output,) = load().run(None, {"input_features": features})
    return float(output[0, 0])


def is_complete(turn: NDArray[np.float32]) -> bool:
    """Return whether a turn is more likely complete than not; see `probability`."""
    return probability(turn) > _COMPLETE


@functools.cache
def _mel_settings() -> MelSettings:
    return MelSettings.of({"feature_size": 80, "sampling_rate": RATE})


def _file() -> Path | None:
    package = find_spec("pipecat")  # not imported: the file alone is used
    for folder in (package and package.submodule_search_locations) or ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    return None


@functools.cache
def load() -> Any:
    """Load the model, once for all streams. Its `run` may be called by several threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(_file(), options, providers=["CPUExecutionProvider"])
