"""A slot whose rows are not finite, over NxDI's CPU mode: see nxdi_sources."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Engines

BothEngines = tuple[Engines, Engines]
PROMPT, CONTEXT_LENGTH = 256, 320  # positions of a prompt, and of the talker's slot
WINDOW = 128  # a longer slot makes a step read all positions


@pytest.mark.parametrize("clears", [True, False])
def test_a_cleared_slot_replies_as_if_no_row_had_been_nan(
    both_of: Callable[..., BothEngines], clears: bool
) -> None:
    """The rows of a prompt of the longest bucket and the last one of its reply are NaN.

    The next request in the slot is short, beside a long one. Without the call its reply is NaN.
    """
    _, engines = both_of(talker_context_length=CONTEXT_LENGTH)
    slots: Any = engines.talker._decoder  # type: ignore[union-attr]
    cache = slots._graphs.context_encoding_model.model.kv_mgr.past_key_values

    def prefill(slot: int, rows: int) -> Tensor:
        given = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        return slots.prefill(slot, given, torch.arange(rows).repeat(3, 1))[0]

    def reply() -> list[Tensor]:
        return [prefill(0, 5), *(slots.step([0, 1], torch.ones(2, 64))[0] for _ in range(2))]

    prefill(1, WINDOW + 1)
    expected = reply()
    prefill(1, WINDOW + 1)
    prefill(0, PROMPT)
    for _ in range(3):
        slots.step([0], torch.ones(1, 64))
    for tensor in cache:
        tensor.data[0, :, :PROMPT] = tensor.data[0, :, PROMPT + 2] = float("nan")
    others = [tensor[1:, :, :CONTEXT_LENGTH].clone() for tensor in cache]
    if clears:
        slots.clear(0)
        for tensor, before in zip(cache, others, strict=True):
            assert torch.equal(tensor[1:, :, :CONTEXT_LENGTH], before)
    seen = reply()
    assert torch.equal(seen[0], expected[0]), "a prompt does not read the slot"
    assert clears is all(map(torch.equal, seen, expected))
    assert clears is bool(torch.cat(seen).isfinite().all())
