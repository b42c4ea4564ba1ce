"""Choice between C and torch: C where it was compiled and can take the weights."""

import ctypes
import logging
from collections.abc import Callable
from typing import TypeVar

from qwen3_omni_neuron.cpu.native.binding import UnsuitedError
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.cpu.native.wave import NativeWave
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import DecoderConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker

logger = logging.getLogger(__name__)
Native = TypeVar("Native")


def native_steps(c: DecoderConfig, model: Thinker | Talker, cache: KvCache) -> NativeSteps | None:
    """Return a model's decode steps in C, or None where they must run in torch."""
    return _native(type(model).__name__, lambda library: NativeSteps(c, model, cache, library))


def native_predictor(c: TalkerConfig, predictor: CodePredictor) -> NativePredictor | None:
    """Return the code predictor in C, or None where it must run in torch."""
    return _native("CodePredictor", lambda library: NativePredictor(c, predictor, library))


def native_wave(code2wav: Code2Wav) -> NativeWave | None:
    """Return code2wav's decoder blocks in C, or None where they must run in torch."""
    return _native("Code2Wav", lambda library: NativeWave(code2wav, library))


def _native(name: str, make: Callable[[ctypes.CDLL], Native]) -> Native | None:
    """Make a function of C, or log why it can't be had and return None."""
    library = find_library()
    if library is None:
        logger.info("%s: torch's operations, as the C was not compiled or does not fit", name)
        return None
    try:
        return make(library)
    except UnsuitedError as why:
        logger.info("%s: torch's operations, as %s", name, why)
        return None
