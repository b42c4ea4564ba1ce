"""Decode steps and prompts of thinker and talker in C are the modules'."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import Library, table_of
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptCache, SlotCache
from testing.native_library import needs_c
from testing.native_modules import (
    BLOCK,
    DTYPES,
    LONG,
    POSITIONS,
    STACKS,
    assert_close_in,
    assert_equal,
    copied,
    decode,
    inputs_of,
    made,
    prompt_rows,
)

pytestmark = needs_c


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("slots", [[2], [3, 0, 1]], ids=str)
@pytest.mark.pairs
def test_a_decode_step_is_the_modules(
    config: OmniConfig, library: Library, which: str, stack: str, slots: list[int], dtype: str
) -> None:
    m = made(config, which, stack, dtype)
    expected_cache, inputs = copied(m.cache), inputs_of(m.c, which, len(slots))
    lengths = [3 + 11 * slot for slot in slots]
    positions = [length + 2.5 for length in lengths]
    got = decode(m.native(library), slots, lengths, positions, inputs)
    slot_cache = SlotCache(expected_cache, torch.tensor(slots), torch.tensor(lengths))
    expected = m.model.decode(inputs, torch.tensor(positions), slot_cache)
    assert_close_in(dtype, got, expected, atol=2e-5)
    assert_close_in(dtype, m.cache.keys, expected_cache.keys)
    assert_close_in(dtype, m.cache.values, expected_cache.values)


@torch.no_grad()
@pytest.mark.parametrize("slots", [[2], [3, 0, 1]], ids=str)
def test_a_step_takes_rows_of_tables_and_leaves_hidden_states_there(
    config: OmniConfig, library: Library, slots: list[int]
) -> None:
    m, lengths = made(config, "talker", "tiny"), [5 + slot for slot in slots]
    cache, positions = copied(m.cache), [float(length) for length in lengths]
    table, added = torch.randn(9, m.c.hidden_size), torch.randn(4, m.c.hidden_size)
    ids, hidden = [8, 0, 8][: len(slots)], torch.full((4, m.c.hidden_size), 7.0)
    logits = m.native(library).decode(
        slots, lengths, positions, ids, table_of(table, *table.shape), added, hidden
    )
    rows = added[slots] + table[ids]
    expected = decode(m.native(library, cache=cache), slots, lengths, positions, rows)
    assert_equal((logits, hidden[slots]), expected)
    assert_equal((m.cache.keys, m.cache.values), (cache.keys, cache.values))
    others = [slot for slot in range(4) if slot not in slots]
    assert (hidden[others] == 7).all()
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match=f"{wrong}"):
            m.native(library).decode([0], [1], [1.0], [wrong], table_of(table, *table.shape))


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize(("named", "more"), [(1, 0), (9, 0), (9, 4), (0, 4), (600, 3)])
def test_a_prompt_takes_rows_of_a_table_and_rows_after_them(
    config: OmniConfig, library: Library, which: str, named: int, more: int
) -> None:
    """To the bit what it gives for the same rows; of 600 not all go through the layers together."""
    m, start = made(config, which, "tiny", positions=700), 3
    cache, count = copied(m.cache), named + more
    ids = torch.randint(2, 50, (named,), generator=torch.Generator().manual_seed(0))
    after, (_, positions) = torch.randn(more, m.c.hidden_size), prompt_rows(m.c, count)
    if which == "thinker":
        rows, table = m.model.embedding(ids), None
    else:
        own = torch.randn(50, m.c.hidden_size)
        rows, table = own[ids], table_of(own, *own.shape)
    expected, _ = m.native(library, cache=cache).prefill(
        1, start, torch.cat((rows, after)), positions
    )
    given = ids.numpy(), positions.numpy(), table, after if more else None
    steps = m.native(library)
    assert torch.equal(steps.prefill_ids(1, start, *given), expected)
    assert_equal((m.cache.keys, m.cache.values), (cache.keys, cache.values))
    m.cache.keys[:, 1, :, start : start + count].zero_()
    assert steps.prefill_ids(1, start, *given, wants_logits=False).shape == (0, len(expected[0]))
    assert_equal((m.cache.keys, m.cache.values), (cache.keys, cache.values))


@torch.no_grad()
def test_ids_and_positions_that_do_not_fit_are_refused(
    config: OmniConfig, library: Library
) -> None:
    m = made(config, "thinker", "tiny")
    steps, ids, at = m.native(library), np.array([1, 2]), np.zeros((3, 2), np.float32)
    for wrong in (-1, 10**9):
        with pytest.raises(IndexError, match=f"{wrong}"):
            steps.prefill_ids(0, 0, np.array([1, wrong]), at)
    for wrong_prompt in ((ids.astype(np.int32), at), (ids, at.astype(float)), (ids, at[:, :1])):
        with pytest.raises(ValueError, match="the C takes"):
            steps.prefill_ids(0, 0, *wrong_prompt)
    with pytest.raises(ValueError, match="the C takes"):
        steps.prefill_ids(0, 0, ids[:1], at, None, torch.zeros(1, m.c.hidden_size + 1))
    with pytest.raises(ValueError, match="no rows"):
        steps.prefill_ids(0, 0, ids[:0], at[:, :0])
    with pytest.raises(IndexError, match="positions"):
        steps.prefill_ids(0, POSITIONS - 1, ids, at)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("count", [1, 2, 21])
@pytest.mark.pairs
def test_a_prompt_is_the_modules(
    config: OmniConfig, library: Library, which: str, stack: str, count: int, dtype: str
) -> None:
    m = made(config, which, stack, dtype)
    rows, positions = prompt_rows(m.c, count)
    own = copied(m.cache).slots(1, 2)
    expected = m.model.prefill(rows, positions, torch.tensor([count - 1]), PromptCache(own))
    before = copied(m.cache)
    assert_close_in(dtype, m.native(library).prefill(1, 0, rows, positions), expected, atol=2e-5)
    for cache, expected_cache, old in (
        (m.cache.keys, own.keys, before.keys),
        (m.cache.values, own.values, before.values),
    ):
        assert_close_in(dtype, cache[:, 1], expected_cache[:, 0])
        assert torch.equal(cache[:, [0, 2, 3]], old[:, [0, 2, 3]]), "other slots"


@torch.no_grad()
@pytest.mark.parametrize("accept_layer", [0, 1, 2, 3])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_the_accept_layer_and_deepstack_are_the_modules(
    config: OmniConfig, library: Library, accept_layer: int, layers: int
) -> None:
    """Accepted rows are those before deepstack adds to them."""
    m = made(config, "thinker", "tiny", accept_layer=accept_layer)
    rows, positions = prompt_rows(m.c, 21)
    visual = torch.tensor([0, 3, 4, 9, 20])
    features = torch.randn(5, layers, m.c.hidden_size).transpose(0, 1)  # not dense
    own = copied(m.cache).slots(1, 2)
    last = torch.tensor([20])
    added = torch.zeros(layers, 21, m.c.hidden_size)
    added[:, visual] = features
    expected = m.model.prefill(rows, positions, last, PromptCache(own), added)
    got = m.native(library).prefill(1, 0, rows, positions, visual, features)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(m.cache.keys[:, 1], own.keys[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
def test_a_prompt_of_several_blocks_is_the_modules(
    config: OmniConfig, library: Library, which: str
) -> None:
    m = made(config, which, "odd", slots=2, positions=LONG)
    rows, positions = prompt_rows(m.c, LONG)
    deepstack: tuple[Tensor, ...] = ()
    added: tuple[Tensor, ...] = ()
    if which == "thinker":
        visual = torch.tensor([7, BLOCK - 1, BLOCK, BLOCK + 1, LONG - 1])
        deepstack = visual, torch.randn(2, 5, m.c.hidden_size)
        added = (torch.zeros(2, LONG, m.c.hidden_size),)
        added[0][:, visual] = deepstack[1]
    own, last = copied(m.cache).slots(1, 2), torch.tensor([LONG - 1])
    expected = m.model.prefill(rows, positions, last, PromptCache(own), *added)
    got = m.native(library, threads=4).prefill(1, 0, rows, positions, *deepstack)
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=1e-5)
