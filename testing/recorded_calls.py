"""Engines whose prompt calls are recorded."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Engines, Talker, Thinker
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt


@dataclass
class Calls:
    """Prompt calls of the engines: name, slot, and how many rows were computed or copied.

    entered, gate: the next prefill sets `entered`, and waits for `gate`.
    """

    made: list[tuple[str, int, int]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def rows(self, name: str) -> list[int]:
        return [rows for called, _, rows in self.made if called == name]


class _Watched:
    """An engine that takes all other attributes from the engine that it wraps."""

    def __init__(self, engine: Any, calls: Calls, name: str):
        self._engine, self._calls, self._name = engine, calls, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def copy(self, source: int, target: int, rows: int) -> None:
        self._calls.made.append((f"{self._name}.copy", target, rows))
        self._engine.copy(source, target, rows)


class WatchedThinker(_Watched):
    """A thinker's engine."""

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        self._calls.entered.set()
        self._calls.gate.wait(30)
        self._calls.made.append(("thinker.prefill", slot, len(prompt) - start))
        return self._engine.prefill(slot, prompt, start, media)


class WatchedTalker(_Watched):
    """A talker's engine."""

    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        self._calls.made.append(("talker.prefill_chunk", slot, len(prompt.token_ids) - start))
        self._engine.prefill_chunk(slot, prompt, start, accepted)

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        self._calls.made.append(("talker.prepare", slot, len(prompt.token_ids) - start))
        self._engine.prepare(slot, prompt, speaker_id, start)


def ungated() -> Calls:
    """Return a recorder whose prefills do not wait."""
    calls = Calls()
    calls.gate.set()
    return calls


def watching(calls: Calls) -> Callable[[Engines], Engines]:
    """Return a function that wraps engines with the recorder of calls."""

    def watch(engines: Engines) -> Engines:
        thinker = cast(Thinker, WatchedThinker(engines.thinker, calls, "thinker"))
        talker = cast(Talker, WatchedTalker(engines.talker, calls, "talker"))
        return replace(engines, thinker=thinker, talker=talker)

    return watch
