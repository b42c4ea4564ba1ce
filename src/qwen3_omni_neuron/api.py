"""Qwen3Omni: a loaded checkpoint that listens, writes and speaks."""

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qwen3_omni_neuron.checkpoint import Checkpoint, resolve_checkpoint
from qwen3_omni_neuron.config import (
    GenerationDefaults,
    OmniConfig,
)
from qwen3_omni_neuron.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.conversation import Conversation, Messages
from qwen3_omni_neuron.cpu.load import build_engines, load_models
from qwen3_omni_neuron.errors import BusyError, ClosedError, OptionError, PromptTooLongError
from qwen3_omni_neuron.events import Event, Finished, SpeechResult
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt import Prompt
from qwen3_omni_neuron.runtime.pipeline import Pipeline, Request, TalkerRequest, ThinkerRequest
from qwen3_omni_neuron.runtime.protocols import Engines

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TARGETS = ("cpu",)
DEFAULT_CONTEXT_LENGTH = 8192


class Qwen3Omni:
    """A loaded model: `load` it, ask it, `close` it (or use it in a `with` block).

    Requests don't share state: they may come from several threads, one slot each.
    """

    def __init__(
        self,
        config: OmniConfig,
        defaults: GenerationDefaults,
        conversation: Conversation,
        engines: Engines,
    ):
        """Made by `load`."""
        self._config, self._defaults, self.conversation = config, defaults, conversation
        self._context_length = engines.thinker.context_length
        self._slots = engines.thinker.slots
        self._lock = threading.Lock()  # guards _pipeline and _free_slots
        self._pipeline: Pipeline | None = Pipeline(engines, config)
        self._free_slots = list(range(self._slots))

    @staticmethod
    def load(
        model_path: str | Path,
        target: str = "cpu",
        dtype: str = "auto",
        max_concurrency: int = 8,
        context_length: int | None = None,
    ) -> "Qwen3Omni":
        """Load a checkpoint.

        model_path: a folder, or a hub id. target: "cpu". dtype: "auto" (the checkpoint's),
        "float32", "bfloat16" or "float64". max_concurrency: slots, so many requests at a time.
        context_length: positions that a slot's KV cache holds (8192, or the model's own limit
        where that is less); prompt and reply must fit.
        Raises CheckpointError for a checkpoint that can't be used, OptionError for an argument.
        """
        if target not in TARGETS:
            raise OptionError(f"target is one of {', '.join(TARGETS)}, got {target!r}.")
        if dtype != "auto" and dtype not in DTYPES:
            raise OptionError(f"dtype is auto or one of {', '.join(DTYPES)}, got {dtype!r}.")
        if max_concurrency < 1:
            raise OptionError(f"max_concurrency is 1 or more, got {max_concurrency}.")
        folder = resolve_checkpoint(model_path)
        config = read_config(folder)
        if dtype == "auto" and config.dtype not in DTYPES:
            raise OptionError(
                f"this checkpoint is in {config.dtype}, which is not run; load it with dtype "
                f"{', '.join(DTYPES)}."
            )
        weight_dtype = DTYPES[config.dtype if dtype == "auto" else dtype]
        limit = config.thinker.text.max_positions
        if context_length is None:
            context_length = min(limit, DEFAULT_CONTEXT_LENGTH)
        if not 2 <= context_length <= limit:
            raise OptionError(
                f"context_length is 2 to {limit} for this checkpoint, got {context_length}."
            )
        conversation = Conversation(folder, config)
        models = load_models(Checkpoint(folder), config, weight_dtype, context_length)
        engines = build_engines(
            models, config, conversation.newline_id, max_concurrency, context_length
        )
        return Qwen3Omni(config, read_generation_defaults(folder), conversation, engines)

    def generate_audio(self, messages: Messages, **options: Any) -> SpeechResult:
        """Answer a conversation in text and speech: the collected `stream`."""
        return _collect(self.stream(messages, **options))

    def generate_text(self, messages: Messages, **options: Any) -> SpeechResult:
        """Answer a conversation in text alone: the same result, with no audio in it."""
        return _collect(self._start(messages, options, speak=False))

    def stream(self, messages: Messages, **options: Any) -> Iterator[Event]:
        """Answer a conversation, event by event: TextDelta, AudioChunk, and Finished at the end.

        messages: dicts with "role" and "content", a string or a list of text and audio items (see
        conversation.Conversation.prompt). options: see options.RequestOptions.
        Every token of the returned text is spoken, the last one too where a limit cut the reply;
        the reference leaves that one out.
        Raises MessageError, AudioError, OptionError or PromptTooLongError at once, and BusyError
        or ClosedError when the first event is asked for.
        """
        return self._start(messages, options, speak=True)

    def close(self) -> None:
        """Give the memory back. Requests that still run end; later ones get a ClosedError."""
        with self._lock:
            self._pipeline = None

    def __enter__(self) -> "Qwen3Omni":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, messages: Messages, given: dict[str, Any], speak: bool) -> Iterator[Event]:
        arrived_s = time.perf_counter()
        options = RequestOptions.parse(given)
        talker = None
        if speak:
            talker = TalkerRequest(
                options.speaker_id(self._config),
                options.talker_sampling(),
                options.predictor_sampling(),
                options.talker_max_new_tokens,
            )
        prompt = self.conversation.prompt(messages)
        self._check_length(prompt)
        thinker = ThinkerRequest(
            prompt,
            options.thinker_sampling(self._defaults),
            options.thinker_max_new_tokens,
            options.eos_ids(self._config),
            self.conversation.decode,
        )
        seed = secrets.randbits(32) if options.seed is None else options.seed
        request = Request(thinker, talker, seed, arrived_s)
        return self._events(request)

    def _check_length(self, prompt: Prompt) -> None:
        if len(prompt) >= self._context_length:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens and the KV cache {self._context_length} "
                "positions, one of which the reply needs. Shorten the conversation, or load with "
                f"a larger context_length (this checkpoint: up to "
                f"{self._config.thinker.text.max_positions})."
            )

    def _take_slot(self) -> tuple[Pipeline, int]:
        with self._lock:
            if self._pipeline is None:
                raise ClosedError("this model was closed; load it again.")
            if not self._free_slots:
                raise BusyError(
                    f"all {self._slots} slots are in use. Finish or close a stream first, or load "
                    "with a larger max_concurrency."
                )
            return self._pipeline, self._free_slots.pop()

    def _events(self, request: Request) -> Iterator[Event]:
        # Taken by the first event asked for: an iterator that is dropped unused holds no slot.
        pipeline, slot = self._take_slot()
        try:
            yield from pipeline.run(request, slot)
        finally:
            with self._lock:
                self._free_slots.append(slot)


def generate_audio(messages: Messages, model_path: str | Path, **options: Any) -> SpeechResult:
    """Load a checkpoint, answer one conversation in text and speech, and close it.

    options: those of `Qwen3Omni.load`, and those of a request.
    """
    load_names = ("target", "dtype", "max_concurrency", "context_length")
    load_options = {name: options.pop(name) for name in load_names if name in options}
    with Qwen3Omni.load(model_path, **load_options) as omni:
        return omni.generate_audio(messages, **options)


def _collect(events: Iterator[Event]) -> SpeechResult:
    for event in events:
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("a stream ends with Finished")
