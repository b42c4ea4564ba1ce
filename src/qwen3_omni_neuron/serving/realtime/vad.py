"""Silero's voice activity model on the CPU: probability of speech in a frame of 32 ms."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 16000
FRAME_SAMPLES = 512
_CONTEXT_SAMPLES = 64  # samples of the frame before, which the model gets again
INSTALL = "pip install 'qwen3-omni-neuron[realtime]'"


def is_installed() -> bool:
    """Return whether the packages of the extra `realtime` are installed."""
    return all(find_spec(name) is not None for name in ("onnxruntime", "silero_vad"))


class SileroVad:
    """Voice activity model with the state of one stream.

    Source: silero-vad utils_vad.py, OnnxWrapper.
    """

    def __init__(self) -> None:
        self._model = _model()
        self.reset()

    def reset(self) -> None:
        """Reset the state for a new stream."""
        self._state = np.zeros((2, 1, 128), np.float32)
        self._frame = np.zeros((1, _CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)

    def __call__(self, frame: NDArray[np.float32]) -> float:
        """Return the probability of speech in a frame. frame: float32 [FRAME_SAMPLES] at RATE."""
        self._frame[0, :_CONTEXT_SAMPLES] = self._frame[0, -_CONTEXT_SAMPLES:]
        self._frame[0, _CONTEXT_SAMPLES:] = frame
        given = {"input": self._frame, "state": self._state, "sr": np.array(RATE, np.int64)}
        output, self._state = self._model.run(None, given)
        return float(output[0, 0])


@functools.cache
def _model() -> Any:
    """Load the model once for all streams; its `run` may be called by several threads."""
    import onnxruntime

    package = find_spec("silero_vad")  # an import would load its training dependencies, too
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "data" / "silero_vad.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
