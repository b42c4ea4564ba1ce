"""Graphs that append rows to a slot, and that copy slots: the same as one prefill of everything."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, PromptState
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.graphs.decoders import (
    decode_graph,
    decoder_config,
    flush_graph,
    kv_cache_state,
    prompt_graph,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from testing.graph_cases import TINY_PLAN, with_weights
from testing.models import load_models

pytestmark = pytest.mark.usefixtures("no_gradients")
EXACT = {"atol": 0.0, "rtol": 0.0, "equal_nan": True}
CLOSE = {"atol": 1e-9, "rtol": 1e-9}  # float64: sums in another order
POSITIONS = 32  # of a slot
ROWS, SLOT = 8, 1  # padded rows of a chunk; the slot that is filled
NAN = float("nan")
PLAN = replace(
    TINY_PLAN, dtype="float64", context_length=POSITIONS, talker_context_length=POSITIONS
)
# Lengths of the slot after each call.
CUTS = ([1, 9], [1, 2], [13, 21], [5, 6, 14, 22, 25], [24, 32], [29, 32], [30, 31, 32])


@pytest.fixture(scope="module")
def models(checkpoint, config) -> Models:
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    return with_weights(static_models(config, torch.float64), weights)


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
    ):
        self._config, self._model, self._part = config, getattr(models, part), part
        self._deepstack, self.slot = deepstack, slot
        generator = torch.Generator().manual_seed(9)
        self._tensors = [s.example(generator) for s in kv_cache_state(config, part, PLAN)]
        self.length = self.held = 0

    @property
    def state(self) -> Tensor:
        """All slots' segments, [slots, 2 layers, kv_heads, positions, head_dim]."""
        return torch.cat(self._tensors[1:], 3)

    def add(self, rows: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Append the rows, with NaN as padding; where `window` is None, without padding.

        Returns the logits and the hidden states of the rows that are no padding.
        """
        assert self.held == self.length, "recent rows are in the segments"
        n, start = len(rows), self.length
        padded = n if window is None else max(ROWS, n)
        x = torch.full((padded, rows.shape[1]), NAN, dtype=rows.dtype)
        at = torch.full((3, padded), NAN)
        x[:n], at[:, :n] = rows, positions
        inputs = [x, at, torch.tensor([n - 1]), torch.tensor([self.slot]), torch.tensor([start])]
        if self._part == "thinker":
            layers = len(self._config.thinker.vision.deepstack_layers)
            own = torch.zeros(layers, n, rows.shape[1], dtype=rows.dtype)
            if self._deepstack is not None:
                own = self._deepstack[:, start : start + n]
            inputs.append(F.pad(own, (0, 0, 0, padded - n), value=NAN))
        graph = prompt_graph(self._config, self._part, padded, window or POSITIONS, PLAN)
        logits, hidden = self._call(graph, inputs)
        self.length = self.held = start + n
        return logits, hidden[:n]

    def step(self, row: Tensor, position: float) -> Tensor:
        """Decode one row, and return its logits."""
        graph = decode_graph(self._config, self._part, 1, POSITIONS, PLAN)
        counts = (torch.tensor([n]) for n in (self.held, self.length - self.held, self.slot))
        self.length += 1
        codes = (spec.idle_input() for spec in graph.inputs[:-5])
        return self._call(graph, [*codes, row, torch.tensor([position]), *counts])[0]

    def flush(self, target: int | None = None) -> None:
        """Move the recent rows. With a target, copy the slot, and go on there."""
        held, counts = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        held[:], counts[self.slot] = POSITIONS, self.length - self.held
        held[self.slot] = self.held
        slots = torch.tensor([self.slot]), torch.tensor([self.slot if target is None else target])
        self._call(flush_graph(self._config, self._part, POSITIONS, PLAN), [held, counts, *slots])
        self.held = self.length
        self.slot = self.slot if target is None else target

    def cut(self, length: int) -> None:
        """Forget the rows after the first ones."""
        self.length = self.held = length

    def fill_after(self, value: float) -> None:
        """Fill the positions that the slot does not use."""
        self.fill_recent_after(value)
        begin = 0
        for held in self._tensors[1:]:
            held[self.slot, :, :, max(0, self.held - begin) :] = value
            begin += held.shape[3]

    def fill_recent_after(self, value: float) -> None:
        """Fill the recent rows that are not in use."""
        self._tensors[0][self.slot, :, :, self.length - self.held :] = value

    def used(self) -> Tensor:
        """Return the keys and values of the positions that the slot uses."""
        recent = self._tensors[0][self.slot, :, :, : self.length - self.held]
        return torch.cat((self.state[self.slot, :, :, : self.held], recent), 2)

    def _call(self, graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs, taken = len(graph.outputs), len(graph.state)
        given = graph.module(self._model)(*inputs, *self._tensors[:taken])
        self._tensors = [*given[outputs:], *self._tensors[taken:]]
        return [*given[:outputs]]


def prompt_of(config: OmniConfig, part: str, rows: int) -> tuple[Tensor, Tensor]:
    """Rows, and positions that differ on each axis."""
    generator = torch.Generator().manual_seed(rows)
    width = decoder_config(config, part).hidden_size
    positions = torch.randint(0, 50, (3, rows), generator=generator).float()
    return torch.randn(rows, width, generator=generator, dtype=torch.float64), positions


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("part", ["thinker", "thinker_visual", "talker"])
def test_rows_in_chunks_are_those_of_one_prefill(config, models, part, cuts) -> None:
    """Padding is NaN, and so is what the slot has after its rows, which becomes zeros."""
    visual = None
    if part == "thinker_visual":
        where = torch.tensor([row for row in (0, 3, 4, 5, 12, 13, 14, 30) if row < cuts[-1]])
        layers = len(config.thinker.vision.deepstack_layers)
        width = config.thinker.text.hidden_size
        visual = torch.zeros(layers, cuts[-1], width, dtype=torch.float64)
        visual[:, where] = torch.randn(layers, len(where), width, dtype=torch.float64)
    part = part.removesuffix("_visual")
    rows, positions = prompt_of(config, part, cuts[-1])
    whole, pieces = (Slot(config, models, part, visual) for _ in range(2))
    logits, hidden = whole.add(rows, positions, None)
    seen = []
    for stop in cuts:
        piece = slice(pieces.length, stop)
        pieces.fill_after(NAN)
        before = pieces.state
        last_logits, some = pieces.add(rows[piece], positions[:, piece], 32)
        seen.append(some)
        now, others = pieces.state, [slot for slot in range(3) if slot != SLOT]
        torch.testing.assert_close(now[others], before[others], **EXACT)
        held = (SLOT, slice(None), slice(None), slice(0, piece.start))
        torch.testing.assert_close(now[held], before[held], **EXACT)
        assert not now[SLOT, :, :, stop:].any(), "zeros, as a step reads them"
    torch.testing.assert_close(last_logits, logits, **CLOSE)
    torch.testing.assert_close(torch.cat(seen) if part == "thinker" else some, hidden, **CLOSE)
    torch.testing.assert_close(pieces.used(), whole.used(), **CLOSE)


def test_decode_goes_on_after_chunks_flushes_and_copies(config, models) -> None:
    """Recent rows are garbage but for those in use; a copy is over garbage."""
    for part in ("thinker", "talker"):
        rows, positions = prompt_of(config, part, 21)
        whole, pieces, copied = (Slot(config, models, part) for _ in range(3))
        whole.add(rows, positions, None)
        for slot in (pieces, copied):
            slot.add(rows[:15], positions[:, :15], None)
        copied.flush(2)
        for slot in (pieces, copied):
            slot.add(rows[15:], positions[:, 15:], 32)
        for step in range(5):
            if step in (1, 3):  # one recent row, and two, which is all that there is room for
                pieces.flush()
            if step in (2, 4):
                copied.flush(4 - step)
                whole.flush()
            row = torch.tensor([7]) if part == "thinker" else rows[3:4]
            expected = whole.step(row, 50.0 + step)
            for slot in (pieces, copied):
                slot.fill_recent_after(NAN)
                torch.testing.assert_close(slot.step(row, 50.0 + step), expected, **CLOSE)
                torch.testing.assert_close(slot.used(), whole.used(), **CLOSE)


def test_a_smaller_window_is_the_same(config, models) -> None:
    rows, positions = prompt_of(config, "thinker", 20)
    given = []
    for window in (20, 24, POSITIONS):
        slot = Slot(config, models, "thinker")
        slot.add(rows[:17], positions[:, :17], None)
        given.append(slot.add(rows[17:], positions[:, 17:], window))
    for logits, hidden in given[:2]:
        torch.testing.assert_close(logits, given[2][0], **CLOSE)
        torch.testing.assert_close(hidden, given[2][1], **CLOSE)


def test_what_a_prefill_adds_is_what_the_cpu_adds_to_the_bit() -> None:
    """Keys and values, in a slot that has earlier ones, and which of them each row sees."""
    torch.manual_seed(0)
    segments = tuple(torch.randn(3, 4, 2, positions, 4) for positions in (8, 3))
    held = torch.cat(segments, 3).transpose(0, 1)
    cache = KvCache(held[::2].clone(), held[1::2].clone())
    start, rows, slot = 6, 5, 1
    placed = PromptCache(cache.slots(slot, slot + 1).window(start + rows), start)
    pure = PromptState(
        segments, torch.tensor([slot]), torch.tensor([start]), torch.tensor([rows - 1]), rows
    )
    for layer in range(2):
        new = torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4)
        ((keys, values),) = placed.append(layer, *new)
        parts = pure.append(layer, *new)
        for row in range(rows):
            ours, theirs = pure.mask[0, 0, row], placed.mask[0, 0, row]
            for index, expected in enumerate((keys, values)):
                seen = torch.cat([part[index] for part in parts], 2)[:, :, ~ours]
                torch.testing.assert_close(seen, expected[:, :, ~theirs], **EXACT)
    written = torch.cat(pure.new_state, 3).transpose(0, 1)
    torch.testing.assert_close(written[::2], cache.keys, **EXACT)
    torch.testing.assert_close(written[1::2], cache.values, **EXACT)


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_a_copy_changes_its_target_alone(config, models, part) -> None:
    slot = Slot(config, models, part)
    slot.cut(POSITIONS)
    before = slot.state
    slot.flush(0)
    torch.testing.assert_close(slot.state, before[[SLOT, 1, 2]], **EXACT)
    slot.flush()  # onto itself
    torch.testing.assert_close(slot.state, before[[SLOT, 1, 2]], **EXACT)
