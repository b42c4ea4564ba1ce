"""NaN in one request's state ends it, and reaches no other request, beside it or after it."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cpu import precision
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import EngineError
from testing.native_library import needs_c

SHORT, LONG, VICTIM = "Hello", "z" * 90, "a" * 200
OPTIONS: dict[str, Any] = {
    **{f"{stage}_do_sample": False for stage in ("thinker", "talker", "predictor")},
    **{"runaway_speech": "keep", "ignore_eos": True},
}
Plant = Callable[[Any, int], None]


def keys(engine: Any, slot: int) -> None:
    engine._kv_slots._cache.keys[:, slot, :, : engine._kv_slots._lengths[slot]] = torch.nan


def values(engine: Any, slot: int) -> None:
    engine._kv_slots._cache.values[:, slot, :, : engine._kv_slots._lengths[slot]] = torch.nan


def hidden(engine: Any, slot: int) -> None:
    engine._hidden[slot] = torch.nan


def feedback(engine: Any, slot: int) -> None:
    engine._feedback[slot] = torch.nan


def stream(engine: Any, slot: int) -> None:
    """The keys, values and convolution inputs of code2wav."""
    for part in engine._states[slot]:
        if "float" in str(part.dtype):
            part[:] = torch.nan


PLANTS: list[tuple[str, str, Plant, str]] = [
    ("thinker", "step", keys, "The thinker .* text token 2"),
    ("thinker", "step", values, "The thinker .* text token 2"),
    ("talker", "step", keys, "The talker .* code 0 of frame 2"),
    ("talker", "step", values, "The talker .* code 0 of frame 2"),
    ("talker", "step", feedback, "The talker .* code 0 of frame 2"),
    ("talker", "predict", hidden, "The code predictor .* code 1 of frame 1"),
    ("vocoder", "step", stream, r"The vocoder .* from frame \d+ on"),
]


class Planting:
    """An engine into whose victims' slots NaN is planted before a call."""

    def __init__(self, engine: Any, name: str, planned: list[Any], victims: set[int]):
        self._engine, self._name, self._planned, self._victims = engine, name, planned, victims

    def __getattr__(self, name: str) -> Any:
        found, name_of = getattr(self._engine, name), self._name
        if not self._planned or (name_of, name) != self._planned[0][:2]:
            return found

        def call(slots: Any, *given: Any) -> Any:
            for slot in self._victims.intersection(slots):
                with torch.inference_mode():
                    self._planned[0][2](self._engine, slot)
            return found(slots, *given)

        return call


class PlantingThinker(Planting):
    def prefill(self, slot: int, prompt: Any, *given: Any) -> Any:
        (self._victims.add if len(prompt) > len(VICTIM) else self._victims.discard)(slot)
        return self._engine.prefill(slot, prompt, *given)


def at_once(omni: Qwen3Omni, *texts: str) -> list[Any]:
    """Return the replies' tokens and codes, or their errors, in order."""
    found: list[Any] = [None] * len(texts)

    def work(place: int) -> None:
        tokens = 24 if texts[place] == LONG else 8
        limits: Any = {"thinker_max_new_tokens": tokens, "talker_max_new_tokens": tokens}
        try:
            reply = omni.generate_audio(texts[place], **limits, **OPTIONS)
            found[place] = reply.token_ids, reply.codes.tolist()
        except EngineError as error:
            found[place] = str(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("dtype", "in_c"),
    [
        pytest.param("mixed", True, marks=needs_c),
        ("mixed", False),
        ("float32", False),
        ("bfloat16", False),
    ],
)
def test_nan_in_a_slot_ends_its_request_alone(checkpoint, dtype, in_c, monkeypatch) -> None:
    if not in_c:
        monkeypatch.setattr(precision, "find_library", lambda: None)
    planned, victims = list[Any](), set[int]()

    def plant(engines: Engines) -> Engines:
        around: Any = {
            name: Planting(getattr(engines, name), name, planned, victims)
            for name in ("talker", "vocoder")
        }
        around["thinker"] = PlantingThinker(engines.thinker, "thinker", planned, victims)
        return replace(engines, **around)

    how: Any = {"dtype": dtype, "max_concurrency": 2, "threads": 2, "wrap_engines": plant}
    with Qwen3Omni.load(checkpoint, **how) as omni:
        (short,), (long,) = at_once(omni, SHORT), at_once(omni, LONG)
        for case in PLANTS:
            planned[:] = [case]
            ended, beside = at_once(omni, VICTIM, LONG)
            assert isinstance(ended, str), case
            assert re.match(case[3], ended), (case, ended)
            assert beside == long, case
            assert all(isinstance(one, str) for one in at_once(omni, VICTIM, VICTIM)), case
            assert at_once(omni, LONG, SHORT) == [long, short], case
        assert at_once(omni, SHORT) == [short]
