"""Qwen3-Omni for AWS Neuron and for the CPU: it listens, writes and speaks.

Names are imported on first use: torch takes a second, and not every command needs it.
"""

import gc
from importlib import import_module

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION

TYPE_CHECKING = False  # not from typing, whose import would take longest of all
if TYPE_CHECKING:
    from qwen3_omni_neuron.api import Qwen3Omni, generate_audio
    from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
    from qwen3_omni_neuron.errors import Qwen3OmniError
    from qwen3_omni_neuron.events import AudioChunk, Finished, SpeechResult, TextDelta, Timings

__version__ = PACKAGE_VERSION
__all__ = [
    "SPEAKING_CHECKPOINT",
    "AudioChunk",
    "Finished",
    "Qwen3Omni",
    "Qwen3OmniError",
    "SpeechResult",
    "TextDelta",
    "Timings",
    "__version__",
    "generate_audio",
]
_HOMES = {
    "SPEAKING_CHECKPOINT": "checkpoint",
    "Qwen3Omni": "api",
    "generate_audio": "api",
    "Qwen3OmniError": "errors",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing torch leaves no garbage: scans by the collector would take a fifth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        home = import_module(f"{__name__}.{_HOMES.get(name, 'events')}")
        if not gc.get_freeze_count():
            # Together these move all objects to the oldest generation, which is scanned rarely.
            gc.freeze()
            gc.unfreeze()
    finally:
        if collects:
            gc.enable()
    value = globals()[name] = getattr(home, name)
    return value
