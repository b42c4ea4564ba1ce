"""Graphs that append rows to a slot, and that copy slots: the same as one prefill of everything."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import Bank, KvCache, PromptCache, PromptState
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.graphs.decoders import (
    bank_count,
    copy_graph,
    decode_graph,
    decoder_config,
    kv_cache_state,
    prompt_graph,
    slots_per_bank,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from testing.graph_cases import TINY_PLAN, with_weights
from testing.models import load_models

EXACT = {"atol": 0.0, "rtol": 0.0, "equal_nan": True}
CLOSE = {"atol": 1e-9, "rtol": 1e-9}  # float64: sums in another order
POSITIONS = 32  # of a slot
ROWS, SLOT = 8, 1  # padded rows of a chunk; the slot that is filled
NAN = float("nan")
PLAN = replace(
    TINY_PLAN, dtype="float64", context_length=POSITIONS, talker_context_length=POSITIONS
)
# Tensors that hold one slot, three of its segments each, and tensors that hold two.
PLANS = {1: PLAN, 2: replace(PLAN, max_concurrency=9, batches=(1, 9))}
# Lengths of the slot after each call.
CUTS = ([1, 9], [1, 2], [13, 21], [5, 6, 14, 22, 25], [24, 32], [29, 32], [30, 31, 32])


@pytest.fixture(scope="module")
def models(checkpoint: Path, config: OmniConfig) -> Models:
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    return with_weights(static_models(config, torch.float64), weights)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Slot:
    """One slot of a part's KV cache, filled by the part's graphs; the state is garbage at first.

    deepstack: what is added to the prompt's rows, [layers, S, hidden].
    """

    def __init__(
        self,
        config: OmniConfig,
        models: Models,
        part: str,
        deepstack: Tensor | None = None,
        slot: int = SLOT,
        plan: CompilePlan = PLAN,
    ):
        self._config, self._model, self._part = config, getattr(models, part), part
        self._deepstack, self.slot, self._plan = deepstack, slot, plan
        generator = torch.Generator().manual_seed(9)
        spec = kv_cache_state(config, part, plan)
        self._each = len(spec) // bank_count(plan)
        self._slots_per_bank = slots_per_bank(plan)
        self._tensors = [tensor.example(generator) for tensor in spec]
        self.length = 0

    @property
    def state(self) -> Tensor:
        """All slots, [slots, 2 layers, kv_heads, positions, head_dim]."""
        firsts = range(0, len(self._tensors), self._each)
        return torch.cat([torch.cat(self._tensors[i : i + self._each], 3) for i in firsts])

    def add(self, rows: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Append the rows, with NaN as padding; where `window` is None, without padding.

        Returns the logits and the hidden states of the rows that are no padding.
        """
        n, start = len(rows), self.length
        padded = n if window is None else max(ROWS, n)
        x = torch.full((padded, rows.shape[1]), NAN, dtype=rows.dtype)
        at = torch.full((3, padded), NAN)
        x[:n], at[:, :n] = rows, positions
        inputs = [x, at, torch.tensor([n - 1]), torch.tensor([start])]
        if self._part == "thinker":
            own = torch.zeros(
                len(self._config.thinker.vision.deepstack_layers), n, rows.shape[1]
            ).double()
            if self._deepstack is not None:
                own = self._deepstack[:, start : start + n]
            inputs.append(F.pad(own, (0, 0, 0, padded - n), value=NAN))
        graph = prompt_graph(self._config, self._part, padded, window or POSITIONS, self._plan)
        logits, hidden = self._call(graph, inputs, [self.slot])
        self.length += n
        return logits, hidden[:n]

    def step(self, row: Tensor, position: float) -> Tensor:
        """Decode one row, and return its logits."""
        graph = decode_graph(self._config, self._part, 1, POSITIONS, self._plan)
        inputs = [row, torch.tensor([position]), torch.tensor([self.length])]
        self.length += 1
        return self._call(graph, inputs, [self.slot])[0]

    def copy(self, target: int) -> None:
        """Copy the slot to another one, and go on there."""
        graph = copy_graph(self._config, self._part, self._plan)
        self._call(graph, [], [self.slot, target])
        self.slot = target

    def fill_after(self, value: float) -> None:
        """Fill the positions that the slot does not use."""
        begin, (bank, place) = 0, divmod(self.slot, self._slots_per_bank)
        for held in self._tensors[bank * self._each : (bank + 1) * self._each]:
            held[place, :, :, max(0, self.length - begin) :] = value
            begin += held.shape[3]

    def used(self) -> Tensor:
        """Return the keys and values of the positions that the slot uses."""
        return self.state[self.slot, :, :, : self.length]

    def _call(self, graph: Graph, inputs: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor]:
        """Call a graph with the banks of its slots, and of others where it takes more."""
        size, named = self._slots_per_bank, []
        for bank in (*(slot // size for slot in slots), *range(len(self._tensors))):
            if bank not in named:
                named.append(bank)
        banks = named[: graph.banks]
        if size > 1:
            places = [banks.index(slot // size) * size + slot % size for slot in slots]
            inputs = [*inputs, torch.tensor(places)]
        assert len(inputs) == len(graph.inputs)
        each = len(graph.state) // graph.banks
        taken = [bank * self._each + index for bank in banks for index in range(each)]
        given = graph.module(self._model)(*inputs, *[self._tensors[index] for index in taken])
        for index, new in zip(taken, given[len(graph.outputs) :], strict=True):
            self._tensors[index] = new.clone()
        return [*given[: len(graph.outputs)]]


def prompt_of(config: OmniConfig, part: str, rows: int) -> tuple[Tensor, Tensor]:
    """Rows, and positions that differ on each axis."""
    generator = torch.Generator().manual_seed(rows)
    width = decoder_config(config, part).hidden_size
    positions = torch.randint(0, 50, (3, rows), generator=generator).float()
    return torch.randn(rows, width, generator=generator, dtype=torch.float64), positions


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("part", ["thinker", "thinker_visual", "talker"])
@pytest.mark.parametrize("per_bank", PLANS)
def test_rows_in_chunks_are_those_of_one_prefill(
    config: OmniConfig, models: Models, part: str, cuts: list[int], per_bank: int
) -> None:
    """Padding is NaN, and so is what the slot holds after its rows; both stay where they are."""
    visual = None
    if part == "thinker_visual":
        where = torch.tensor([row for row in (0, 3, 4, 5, 12, 13, 14, 30) if row < cuts[-1]])
        layers = len(config.thinker.vision.deepstack_layers)
        width = config.thinker.text.hidden_size
        visual = torch.zeros(layers, cuts[-1], width, dtype=torch.float64)
        visual[:, where] = torch.randn(layers, len(where), width, dtype=torch.float64)
    part, plan = part.removesuffix("_visual"), PLANS[per_bank]
    assert slots_per_bank(plan) == per_bank
    rows, positions = prompt_of(config, part, cuts[-1])
    whole = Slot(config, models, part, visual)
    pieces = Slot(config, models, part, visual, plan=plan)
    logits, hidden = whole.add(rows, positions, None)
    seen = []
    for stop in cuts:
        piece = slice(pieces.length, stop)
        pieces.fill_after(NAN)
        before = pieces.state
        last_logits, some = pieces.add(rows[piece], positions[:, piece], 32)
        seen.append(some)
        now, others = pieces.state, [s for s in range(len(before)) if s != SLOT]
        torch.testing.assert_close(now[others], before[others], **EXACT)
        for kept in (slice(0, piece.start), slice(stop, None)):
            at = (SLOT, slice(None), slice(None), kept)
            torch.testing.assert_close(now[at], before[at], **EXACT)
    torch.testing.assert_close(last_logits, logits, **CLOSE)
    torch.testing.assert_close(torch.cat(seen) if part == "thinker" else some, hidden, **CLOSE)
    torch.testing.assert_close(pieces.used(), whole.used(), **CLOSE)


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_decode_goes_on_after_appended_rows(config: OmniConfig, models: Models, part: str) -> None:
    """In the slot that was appended to, and in one that its rows were copied to, over garbage."""
    rows, positions = prompt_of(config, part, 21)
    two = PLANS[2]
    whole, pieces, copied = (Slot(config, models, part) for _ in range(3))
    near, far = (Slot(config, models, part, plan=two) for _ in range(2))
    changed = pieces, copied, near, far
    whole.add(rows, positions, None)
    for slot in changed:
        slot.add(rows[:15], positions[:, :15], None)
    copied.copy(2)
    near.copy(0)  # in the tensors that hold slots 0 and 1
    far.copy(6)
    for slot in changed:
        slot.add(rows[15:], positions[:, 15:], 32)
        slot.fill_after(1e3)
    for position in (50.0, 51.0):
        row = torch.tensor([7]) if part == "thinker" else rows[3:4]
        expected = whole.step(row, position)
        for slot in changed:
            torch.testing.assert_close(slot.step(row, position), expected, **CLOSE)


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_rows_are_cut_back_before_others_are_appended(
    config: OmniConfig, models: Models, part: str
) -> None:
    """No later call reads what the slot held after the cut."""
    rows, positions = prompt_of(config, part, 20)
    whole, changed = (Slot(config, models, part) for _ in range(2))
    expected, _ = whole.add(rows, positions, None)
    changed.add(torch.cat((rows[:14], rows[:14] + 1)), positions[:, [*range(14)] * 2], None)
    changed.length = 14
    logits, _ = changed.add(rows[14:], positions[:, 14:], 32)
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(changed.used(), whole.used(), **CLOSE)


def test_a_smaller_window_is_the_same(config: OmniConfig, models: Models) -> None:
    rows, positions = prompt_of(config, "thinker", 20)
    given = []
    for window in (20, 24, POSITIONS):
        slot = Slot(config, models, "thinker")
        slot.add(rows[:17], positions[:, :17], None)
        given.append(slot.add(rows[17:], positions[:, 17:], window))
    for logits, hidden in given[:2]:
        torch.testing.assert_close(logits, given[2][0], **CLOSE)
        torch.testing.assert_close(hidden, given[2][1], **CLOSE)


@pytest.mark.parametrize("per_bank", [1, 4])
def test_the_cache_is_that_of_the_cpu_to_the_bit(per_bank: int) -> None:
    """Keys, values and mask, without padding and in the window that ends with the last row."""
    torch.manual_seed(0)
    bank: Bank = tuple(torch.randn(per_bank, 4, 2, positions, 4) for positions in (8, 3))
    slot = per_bank - 1
    held = torch.cat(bank, 3).transpose(0, 1)
    cache = KvCache(held[::2].clone(), held[1::2].clone())
    start, rows = 6, 5
    placed = PromptCache(cache.slots(slot, slot + 1).window(start + rows), start)
    named = None if per_bank == 1 else torch.tensor([slot])
    pure = PromptState([bank], named, torch.tensor([start]), torch.tensor([rows - 1]), rows)
    torch.testing.assert_close(pure.mask, placed.mask, **EXACT)
    for layer in range(2):
        new = torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4)
        torch.testing.assert_close(
            pure.append(layer, *new), tuple(placed.append(layer, *new)), **EXACT
        )
    written = torch.cat(pure.new_state, 3).transpose(0, 1)
    torch.testing.assert_close(written[::2], cache.keys, **EXACT)
    torch.testing.assert_close(written[1::2], cache.values, **EXACT)


@pytest.mark.parametrize("part", ["thinker", "talker"])
@pytest.mark.parametrize(("per_bank", "target"), [(1, 0), (2, 0), (2, 7), (2, SLOT)])
def test_a_copy_changes_its_target_alone(
    config: OmniConfig, models: Models, part: str, per_bank: int, target: int
) -> None:
    slot = Slot(config, models, part, plan=PLANS[per_bank])
    before = slot.state
    slot.copy(target)
    expected = [*range(len(before))]
    expected[target] = SLOT
    torch.testing.assert_close(slot.state, before[expected], **EXACT)
