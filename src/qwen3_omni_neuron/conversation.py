"""Messages -> token ids, mel features and positions, by the checkpoint's own files.

The chat template, tokenizer and feature extractor are the checkpoint's, run by transformers. What
is done here is what the reference's processor does between them: each clip's one placeholder
becomes as many as the encoder makes rows of it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qwen3_omni_neuron.audio_input import Waveform, load_waveform
from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.errors import CheckpointError, MessageError
from qwen3_omni_neuron.positions import rope_positions
from qwen3_omni_neuron.prompt import Prompt

ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, Any]]


class Conversation:
    """Turns messages into prompts for one checkpoint.

    Source: transformers Qwen3OmniMoeProcessor.__call__.
    """

    def __init__(self, folder: Path, config: OmniConfig):
        # Imported here: transformers takes seconds, and `import qwen3_omni_neuron` should not.
        from transformers import Qwen2TokenizerFast, WhisperFeatureExtractor

        self._config = config
        try:
            self._tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
            self._features = WhisperFeatureExtractor.from_pretrained(folder)
        except Exception as error:  # each transformers line has its own for a missing file
            raise CheckpointError(
                f"{folder} has no usable tokenizer or preprocessor_config.json: {error}"
            ) from error
        self._template = _chat_template(folder, self._tokenizer.chat_template)
        self._audio_token = self._tokenizer.convert_ids_to_tokens(config.thinker.audio_token_id)
        self.newline_id = self._tokenizer.encode("\n", add_special_tokens=False)[0]

    def prompt(self, messages: Messages) -> Prompt:
        """The prompt of a conversation, ending where the assistant is to speak.

        messages: dicts with "role" (system, user or assistant) and "content": a string, or a list
        of {"type": "text", "text": ...} and {"type": "audio", "audio": ...}.
        Raises MessageError or AudioError, which say which message or item is at fault.
        """
        rate = self._features.sampling_rate
        checked, waveforms = _check_messages(messages, rate)
        text = self._tokenizer.apply_chat_template(
            checked, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        mel = self._mel(waveforms)
        text = self._expand(text, [m.shape[1] for m in mel])
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(torch.tensor(ids), rope_positions(len(ids)), tuple(mel))

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, special ones skipped."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _mel(self, waveforms: list[Waveform]) -> list[torch.Tensor]:
        """float32 [mel_bins, frames] a clip; all in one call, as the reference makes them."""
        if not waveforms:
            return []
        batch = self._features(
            waveforms,
            sampling_rate=self._features.sampling_rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        valid = batch["attention_mask"].bool()
        return [mel[:, mask] for mel, mask in zip(batch["input_features"], valid, strict=True)]

    def _expand(self, text: str, mel_frames: list[int]) -> str:
        pieces = text.split(self._audio_token)
        if len(pieces) - 1 != len(mel_frames):
            raise MessageError(
                f"the conversation has {len(mel_frames)} audio clips but {len(pieces) - 1} "
                f"{self._audio_token} placeholders. Text may not contain {self._audio_token}."
            )
        expanded = [pieces[0]]
        for frames, piece in zip(mel_frames, pieces[1:], strict=True):
            expanded += [self._audio_token * self._config.thinker.audio.tokens(frames), piece]
        return "".join(expanded)


def _chat_template(folder: Path, of_tokenizer: Any) -> Any:
    """The processor's template, in either of its files, else the tokenizer's own."""
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    if legacy.exists():
        return json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    if of_tokenizer is None:
        raise CheckpointError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template.json, "
            "nor one in tokenizer_config.json."
        )
    return of_tokenizer


def _check_messages(messages: Messages, rate: int) -> tuple[list[dict[str, Any]], list[Waveform]]:
    """Messages as the template takes them, and the waveforms of their audio items in order."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise MessageError(
            f'messages is a {kind}; give a list such as [{{"role": "user", "content": "Hello"}}].'
        )
    if not messages:
        raise MessageError("the conversation is empty; it needs at least one user message.")
    checked, waveforms = [], []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise MessageError(f"{where} is a {type(message).__name__}, not a dict.")
        role = message.get("role")
        if role not in ROLES:
            raise MessageError(f"{where} has role {role!r}; it is one of {', '.join(ROLES)}.")
        content, clips = _check_content(message.get("content"), role, where, rate)
        checked.append({"role": role, "content": content})
        waveforms += clips
    if not any(message["role"] == "user" for message in checked):
        raise MessageError("the conversation has no user message; there is nothing to answer.")
    return checked, waveforms


def _check_content(
    content: Any, role: str, where: str, rate: int
) -> tuple[str | list[dict[str, Any]], list[Waveform]]:
    if isinstance(content, str):
        return content, []
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        kind = type(content).__name__
        raise MessageError(f"{where} has content of type {kind}; give a string or a list of items.")
    items, waveforms = [], []
    for index, item in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(item, Mapping):
            raise MessageError(f"{place} is a {type(item).__name__}, not a dict with a type.")
        media = item.get("type")
        if media == "text":
            if not isinstance(item.get("text"), str):
                raise MessageError(f'{place} is text without a "text" string.')
            items.append({"type": "text", "text": item["text"]})
        elif media == "audio":
            if role != "user":
                raise MessageError(f"{place} is audio of role {role}; users alone send it.")
            waveforms.append(load_waveform(item, rate, place))
            items.append({"type": "audio"})
        elif media in ("image", "video"):
            raise MessageError(
                f"{place} is {media}, which this version can't see yet; leave it out."
            )
        else:
            raise MessageError(f"{place} has type {media!r}; text and audio are understood.")
    return items, waveforms
