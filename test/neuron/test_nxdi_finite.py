"""A slot whose rows are not finite, over NxDI's CPU mode: see nxdi_sources."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Engines
from testing.prompts import prompt_of

BothEngines = tuple[Engines, Engines]
CONTEXT_LENGTH = 320  # positions of the talker's slot; a prompt has up to 256


@pytest.mark.parametrize(
    ("stage", "clears"), [("thinker", True), ("talker", True), ("talker", False)]
)
@torch.inference_mode()
def test_a_cleared_slot_replies_as_if_no_row_had_been_nan(
    both_of: Callable[..., BothEngines], stage: str, clears: bool
) -> None:
    """The rows of a prompt of the longest bucket are NaN, and so the last one of its reply.

    The next request in the slot is short, beside a long one, whose steps read all positions.
    Without the call its reply is NaN.
    """
    _, engines = both_of(talker_context_length=CONTEXT_LENGTH)
    engine: Any = getattr(engines, stage)
    slots = engine._decoder
    cache = slots._graphs.context_encoding_model.model.kv_mgr.past_key_values

    def prefill(slot: int, rows: int) -> Tensor:
        if stage == "thinker":
            logits: Tensor = engine.prefill(slot, prompt_of(torch.arange(rows) % 200 + 1))[0]
            return logits
        given = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        return slots.prefill(slot, given, torch.arange(rows).repeat(3, 1))[0]

    def step() -> Tensor:
        if stage == "thinker":
            return slots.step_tokens([0, 1], [5, 6])
        return slots.step([0, 1], torch.ones(2, 64))[0]

    def reply() -> list[Tensor]:
        return [prefill(0, 5), step(), step(), step()]

    rows = slots._plan.prompt_buckets[-1] - 4 * (stage == "thinker")
    prefill(1, rows)
    expected = reply()
    for slot in (0, 1):
        prefill(slot, rows)
    for _ in range(3):
        step()
    for tensor in cache:
        tensor.data[0, :, :rows] = float("nan")
    assert step().isfinite().all(1).tolist() == [False, True], "the other one goes on"
    prefill(1, rows)
    others = [tensor[1:, :, :CONTEXT_LENGTH].clone() for tensor in cache]
    if clears:
        slots.clear(0)
        for tensor, before in zip(cache, others, strict=True):
            assert torch.equal(tensor[1:, :, :CONTEXT_LENGTH], before)
    seen = reply()
    assert torch.equal(seen[0], expected[0]), "a prompt does not read the slot"
    assert clears is all(map(torch.equal, seen, expected))
    assert clears is bool(torch.cat(seen).isfinite().all())
