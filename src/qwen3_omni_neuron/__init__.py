"""Qwen3-Omni for AWS Neuron and for the CPU: it listens, writes and speaks."""

from qwen3_omni_neuron.api import Qwen3Omni, generate_audio
from qwen3_omni_neuron.errors import Qwen3OmniError
from qwen3_omni_neuron.events import AudioChunk, Finished, SpeechResult, TextDelta, Timings

__version__ = "0.1.0"
__all__ = [
    "AudioChunk",
    "Finished",
    "Qwen3Omni",
    "Qwen3OmniError",
    "SpeechResult",
    "TextDelta",
    "Timings",
    "generate_audio",
]
