"""Fields that vllm-omni's clients send beside OpenAI's, and their format of streamed speech.

They give each stage's sampling options in `sampling_params_list`. In a stream they read `content`:
text or a whole WAV file in base64, depending on the top-level `modality`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pybase64

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk
from qwen3_omni_neuron.serving.endpoints.chat_deltas import WRITTEN
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.sound.encoding import pcm16, wav_header

VLLM_OMNI_FIELDS = ("sampling_params_list", "mm_processor_kwargs")
# Names of their fields, and the options of a request. Their other fields have no effect here.
_THINKER = {
    "temperature": "thinker_temperature",
    "top_p": "thinker_top_p",
    "top_k": "thinker_top_k",
    "max_tokens": "thinker_max_new_tokens",
    "seed": "seed",
}
_TALKER = {
    "temperature": "talker_temperature",
    "top_p": "talker_top_p",
    "top_k": "talker_top_k",
    "max_tokens": "talker_max_new_tokens",
    "repetition_penalty": "talker_repetition_penalty",
}


def vllm_omni_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for vllm-omni's own fields. Raises ApiError."""
    stages = extra.get("sampling_params_list") or []
    processor = extra.get("mm_processor_kwargs") or {}
    if (
        not isinstance(stages, list)
        or not all(isinstance(stage, Mapping) for stage in stages)
        or not isinstance(processor, Mapping)
    ):
        raise wrong_value(
            "sampling_params_list is a list of objects, and mm_processor_kwargs an object.",
            "sampling_params_list",
        )
    options: dict[str, Any] = {}
    for stage, names in zip(stages, (_THINKER, _TALKER), strict=False):
        for theirs, ours in names.items():
            value = stage.get(theirs)
            if value is None:
                continue
            if theirs == "temperature" and value == 0:
                options[f"{ours.split('_')[0]}_do_sample"] = False
            else:
                options[ours] = 0 if theirs == "top_k" and value == -1 else value
    if "use_audio_in_video" in processor:
        options["use_audio_in_video"] = processor["use_audio_in_video"]
    return options


def _sound(chunk: AudioChunk) -> Sequence[bytes]:
    data = pcm16(chunk.samples)
    file = pybase64.b64encode(wav_header(SAMPLE_RATE, len(data)) + data)
    return b'{"content":"', file, b'"}'


# Its clients print the content of every piece with text.
VLLM_OMNI = replace(WRITTEN, last=[{"content": ""}], sound=_sound)
"""Format of a spoken answer's deltas for vllm-omni's clients."""
