"""The C kernels against the modules that they replace."""

import ctypes
import dataclasses
import itertools
import logging
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.cpu import precision
from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.native.binding import Library, UnsuitedError, table_of
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav
from qwen3_omni_neuron.cpu.native.draws import NativeDraws
from qwen3_omni_neuron.cpu.native.installed import MismatchError, find_library, load_library
from qwen3_omni_neuron.cpu.native.linear import NativeLinear, use_native_linears
from qwen3_omni_neuron.cpu.native.matrix import pack_in_c
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.sources import source_digest
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.sampling import (
    RequestRandom,
    Sampler,
    SamplingParams,
    allowed_ids,
    sample_ids,
)
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor, sample_top, top_p_limits
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import ResizeMlp, Talker
from qwen3_omni_neuron.model.thinker import Thinker
from testing.packed import packed_and_widened, randomize
from testing.subprocesses import run_python
from testing.teacher_forcing import teacher_forced_logits

# Where there is a compiler there is the library.
pytestmark = pytest.mark.skipif(
    find_library() is None and not shutil.which("cc"), reason="no C compiler, so nothing in C"
)
DTYPES = ("mixed", "float32", "int8")
POSITIONS = 40
BLOCK = 512  # rows of a prompt that go through the layers together: see steps.c
M_PERTURB = -6  # of glibc's malloc.h
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}
LIMITS = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 12}


@pytest.fixture(scope="module")
def library() -> Library:
    found = find_library()
    assert found is not None, "a compiler is there, and the library is not: pip install -e . -v"
    found.grow_pool(4)
    return found


# ---- decode steps and prompts of thinker and talker


def stack_config(c: DecoderConfig, moe: dict[str, object] | None, **sizes: int) -> DecoderConfig:
    """Other sizes than the tiny checkpoint's; moe: None for a dense feed-forward."""
    changed = None if moe is None else dataclasses.replace(c.moe, **moe)
    return dataclasses.replace(c, moe=changed, **sizes)


# Query heads of a KV head: 2, 2, 3, 8, 1, 2, 2. "wide": sums of more than one chunk of 256 inputs,
# and work enough to share.
STACKS: dict[str, tuple[dict[str, object] | None, dict[str, int]]] = {
    "tiny": ({}, {}),
    "dense": (None, {"ffn_width": 96}),
    "odd": (
        {"experts": 5, "experts_per_token": 3, "expert_width": 19, "normalize_weights": False},
        {"hidden_size": 50, "heads": 6, "kv_heads": 2, "head_dim": 24, "vocab_size": 77},
    ),
    "one kv head": (
        {"expert_width": 33},
        {"hidden_size": 33, "heads": 8, "kv_heads": 1, "head_dim": 32, "vocab_size": 31},
    ),
    "one expert": (
        {"experts": 1, "experts_per_token": 1, "expert_width": 1},
        {"heads": 3, "kv_heads": 3, "vocab_size": 1},
    ),
    "every expert": ({"experts": 4, "experts_per_token": 4}, {"vocab_size": 33}),
    "wide": ({"expert_width": 290}, {"hidden_size": 300, "layers": 2, "vocab_size": 500}),
}


class Made(NamedTuple):
    """A decoder: for the C, and for torch with the same weights."""

    c: DecoderConfig
    packed: Thinker | Talker
    model: Thinker | Talker
    cache: KvCache

    def native(
        self, library: Library, threads: int = 1, cache: KvCache | None = None
    ) -> NativeSteps:
        return NativeSteps(self.c, self.packed, cache or self.cache, library, threads)


def made(
    config: OmniConfig,
    which: str,
    stack: str,
    dtype: str = "mixed",
    accept_layer: int = 1,
    slots: int = 4,
    positions: int = POSITIONS,
) -> Made:
    moe, sizes = STACKS[stack]
    model: Thinker | Talker
    if which == "thinker":
        thinker = config.thinker
        c = stack_config(thinker.text, moe, **sizes)
        model = Thinker(dataclasses.replace(thinker, text=c), accept_layer)
    else:
        assert config.talker is not None
        shared = {} if moe is None or stack == "tiny" else {"shared_expert_width": 37}
        c = stack_config(config.talker.text, None if moe is None else moe | shared, **sizes)
        model = Talker(dataclasses.replace(config.talker, text=c))
    randomize(model)
    packed, widened = packed_and_widened(model, which, dtype)
    generator = torch.Generator().manual_seed(2)
    cache = KvCache.zeros(c, slots, positions, torch.float32)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return Made(c, packed, widened, cache)


def copied(cache: KvCache) -> KvCache:
    return KvCache(cache.keys.clone(), cache.values.clone())


def inputs_of(c: DecoderConfig, which: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if which == "thinker":
        return torch.randint(0, c.vocab_size, (count,), generator=generator)
    return torch.randn(count, c.hidden_size, generator=generator)


def prompt_rows(c: DecoderConfig, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Rows and rope positions, whose three axes disagree and which are not dense."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, c.hidden_size, generator=generator)
    positions = torch.randint(0, 90, (count, 3), generator=generator).float().t()
    return rows, positions


def decode(
    steps: NativeSteps,
    slots: list[int],
    lengths: list[int],
    positions: list[float],
    inputs: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """A step with the inputs and outputs of the module's `decode`."""
    if not inputs.is_floating_point():
        return steps.decode(slots, lengths, positions, inputs.tolist())
    hidden = torch.empty(steps._slots, inputs.shape[1])
    rows, places = table_of(inputs, *inputs.shape), range(len(slots))
    logits = steps.decode(slots, lengths, positions, places, rows, None, hidden)
    return logits, hidden[slots]


def parts(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_equal(got: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> None:
    """To the bit."""
    torch.testing.assert_close(parts(got), parts(expected), atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("slots", [[2], [3, 0, 1]], ids=str)
def test_a_decode_step_is_the_modules(
    config: OmniConfig, library: Library, which: str, stack: str, slots: list[int], dtype: str
) -> None:
    """Outputs and what is left in the cache, with slots at places of their own."""
    m = made(config, which, stack, dtype)
    expected_cache, inputs = copied(m.cache), inputs_of(m.c, which, len(slots))
    lengths = [3 + 11 * slot for slot in slots]
    positions = [length + 2.5 for length in lengths]
    got = decode(m.native(library), slots, lengths, positions, inputs)
    slot_cache = SlotCache(expected_cache, torch.tensor(slots), torch.tensor(lengths))
    expected = m.model.decode(inputs, torch.tensor(positions), slot_cache)
    torch.testing.assert_close(parts(got), parts(expected), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(m.cache.keys, expected_cache.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(m.cache.values, expected_cache.values, atol=1e-5, rtol=1e-5)


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


class _Operations(TorchDispatchMode):
    """Torch's operations in a block, but for those by which numpy and torch share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, max_concurrency=2) as omni:
        yield omni


def test_a_reply_without_media_is_computed_without_a_torch_operation(pair: Qwen3Omni) -> None:
    """Each gives up the interpreter lock, which costs more than the arithmetic: NativeTalker."""
    order, ids = (1, 0), (5, 6)
    prompt = pair.conversation.prompt([{"role": "user", "content": "Hello"}])
    engines, c = pair._pipeline._engines, pair._config
    thinker, talker, vocoder = engines.thinker, engines.talker, engines.vocoder
    assert talker is not None and vocoder is not None and c.talker is not None
    speaker_id = next(iter(c.talker.speaker_ids.values()))
    none, chunk = torch.empty(0, c.thinker.text.hidden_size), torch.zeros(2, 16, dtype=torch.int64)
    drawn = [PredictorSampling(np.full(15, 0.5, np.float32), 50, 1.0)] * 2
    steps: list[Callable[[], object]] = [
        lambda: thinker.prefill(1, prompt),
        lambda: thinker.step(order, ids),
        lambda: talker.prepare(1, prompt.talker, speaker_id),
        lambda: talker.prefill(1, none, ids[0]),
        lambda: talker.step(order, ids),
        lambda: talker.predict(order, ids, drawn),
        lambda: vocoder.start(order, [chunk, chunk]),
        lambda: vocoder.step(order, [chunk, chunk]),
    ]
    for step in steps:  # the rows of the voice are made once
        step()
    ids = (250, 251)  # tokens that no request has had
    for number, step in enumerate(steps):
        with _Operations() as operations:
            step()
        assert not operations.names, number


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("count", [1, 2, 21])
def test_a_prompt_is_the_modules(
    config: OmniConfig, library: Library, which: str, stack: str, count: int, dtype: str
) -> None:
    """Logits of its last row, the accept layer's or the last hidden state, and its slot; with three
    axes that disagree."""
    m = made(config, which, stack, dtype)
    rows, positions = prompt_rows(m.c, count)
    own = copied(m.cache).slots(1, 2)
    expected = m.model.prefill(rows, positions, torch.tensor([count - 1]), PromptCache(own))
    before = copied(m.cache)
    got = m.native(library).prefill(1, 0, rows, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    for cache, expected_cache, old in (
        (m.cache.keys, own.keys, before.keys),
        (m.cache.values, own.values, before.values),
    ):
        torch.testing.assert_close(cache[:, 1], expected_cache[:, 0], atol=1e-5, rtol=1e-5)
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
    expected = m.model.prefill(rows, positions, last, PromptCache(own), visual, features)
    got = m.native(library).prefill(1, 0, rows, positions, visual, features)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(m.cache.keys[:, 1], own.keys[:, 0], atol=1e-5, rtol=1e-5)


LONG = BLOCK + 90


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
def test_a_prompt_of_several_blocks_is_the_modules(
    config: OmniConfig, library: Library, which: str
) -> None:
    m = made(config, which, "odd", slots=2, positions=LONG)
    rows, positions = prompt_rows(m.c, LONG)
    deepstack: tuple[Tensor, ...] = ()
    if which == "thinker":
        visual = torch.tensor([7, BLOCK - 1, BLOCK, BLOCK + 1, LONG - 1])
        deepstack = visual, torch.randn(2, 5, m.c.hidden_size)
    own, last = copied(m.cache).slots(1, 2), torch.tensor([LONG - 1])
    expected = m.model.prefill(rows, positions, last, PromptCache(own), *deepstack)
    got = m.native(library, threads=4).prefill(1, 0, rows, positions, *deepstack)
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=1e-5)


# ---- draws of tokens and of code 0

SAMPLINGS = [
    SamplingParams(True, 0.9, 50, 1.0, 1.05),
    SamplingParams(True, 0.7, 20, 0.8),
    SamplingParams(True, 1.4, 300, 0.7, 0.8),
    SamplingParams(True, 1.0, 0, 0.9, 2.0),
    SamplingParams(True, 0.5, 0, 1.0),
    SamplingParams(False, repetition_penalty=1.3),
    SamplingParams(False),
]


@pytest.mark.parametrize("suppressed", [(), range(40, 90)], ids=["all", "some"])
@pytest.mark.parametrize(("vocab", "steps"), [(5, 50), (200, 200), (3000, 50), (151_936, 2)])
def test_draws_are_those_of_numpy(
    library: Library, vocab: int, steps: int, suppressed: range
) -> None:
    """With the interpreter's lock held and without, by the number of logits."""
    allowed = allowed_ids(vocab, suppressed) if suppressed else None

    def samplers() -> list[Sampler]:
        return [
            Sampler(kind, vocab, RequestRandom(seed).talker, torch.tensor([0, 3]), allowed)
            for seed, kind in enumerate(SAMPLINGS)
        ]

    generator, ours, numpys = torch.Generator().manual_seed(vocab), samplers(), samplers()
    draws = NativeDraws(library)
    for _ in range(steps):
        logits = 3 * torch.randn(len(SAMPLINGS), vocab, generator=generator)
        assert draws(ours, logits.split(1)) == sample_ids(numpys, logits.split(1))
    for one, other in zip(ours, numpys, strict=True):
        assert (one.penalties is None) == (other.penalties is None)
        np.testing.assert_array_equal(one.penalties, other.penalties)


def test_logits_of_another_type_are_widened(library: Library) -> None:
    logits = torch.randperm(100, generator=torch.Generator().manual_seed(0)).bfloat16() / 16
    first, second = (Sampler(SAMPLINGS[1], 100, RequestRandom(0).talker) for _ in range(2))
    for _ in range(20):
        assert NativeDraws(library)([first], [logits[None]]) == sample_ids([second], [logits[None]])


def test_logits_of_another_vocabulary_are_refused(library: Library) -> None:
    sampler = Sampler(SAMPLINGS[0], 10, RequestRandom(0).talker)
    with pytest.raises(ValueError, match=r"\[1, 10\]"):
        NativeDraws(library)([sampler], [torch.zeros(1, 9)])


# ---- results that depend neither on threads, nor on rows beside them, nor on pieces

CUTS = [[1], [7], [20], [4, 5, 6], [1, 13, 14, 30], [BLOCK], [BLOCK - 1], [3, BLOCK + 2]]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "stack"), [("thinker", "odd"), ("talker", "wide")])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_prompt_in_pieces_is_the_whole_bit_for_bit(
    config: OmniConfig, library: Library, which: str, stack: str, dtype: str, threads: int
) -> None:
    """At several cuts, within and across the blocks of a long one; so are threads."""
    m = made(config, which, stack, dtype, slots=2, positions=LONG)
    rows, positions = prompt_rows(m.c, LONG)
    expected = m.native(library).prefill(0, 0, rows, positions)
    steps = m.native(library, threads)
    for cuts in CUTS:
        m.cache.keys[:, 1], m.cache.values[:, 1] = float("nan"), float("nan")
        accepted = []
        for start, stop in itertools.pairwise((0, *cuts, LONG)):
            last = steps.prefill(1, start, rows[start:stop], positions[:, start:stop])
            accepted.append(last[1])
        if which == "thinker":
            last = last[0], torch.cat(accepted)
        assert_equal(last, expected)
        assert_equal(m.cache.keys[:, 1], m.cache.keys[:, 0])
        assert_equal(m.cache.values[:, 1], m.cache.values[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head", "wide"])
def test_a_prompt_is_its_rows_appended_one_by_one(
    config: OmniConfig, library: Library, stack: str, dtype: str
) -> None:
    """By decode steps, to the bit: a prompt's rows and a step's differ in nothing but the call."""
    m = made(config, "talker", stack, dtype, slots=2)
    rows, _ = prompt_rows(m.c, POSITIONS)
    steps, at = m.native(library), torch.arange(POSITIONS).float()
    expected = steps.prefill(0, 0, rows, at.expand(3, -1))
    for n in range(POSITIONS):
        got = decode(steps, [1], [n], [float(n)], rows[n : n + 1])
    assert_equal(got, expected)
    assert_equal(m.cache.keys[:, 1], m.cache.keys[:, 0])
    assert_equal(m.cache.values[:, 1], m.cache.values[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head", "wide"])
@pytest.mark.parametrize("count", [2, 3, 5, 8, 13])
def test_a_step_of_several_slots_is_each_alone_bit_for_bit(
    config: OmniConfig, library: Library, which: str, stack: str, dtype: str, count: int
) -> None:
    m = made(config, which, stack, dtype, slots=count)
    alone_cache, inputs = copied(m.cache), inputs_of(m.c, which, count)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    lengths, positions = [(5 + 7 * s) % POSITIONS for s in slots], [1.0 + s for s in slots]
    together = parts(decode(m.native(library, 4), slots, lengths, positions, inputs))
    alone = m.native(library, cache=alone_cache)
    for row, slot in enumerate(slots):
        own = decode(alone, [slot], [lengths[row]], [positions[row]], inputs[row : row + 1])
        assert_equal(own, tuple(t[row : row + 1] for t in together))
    assert_equal(m.cache.keys, alone_cache.keys)
    assert_equal(m.cache.values, alone_cache.values)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("out", [1, 31, 33, 64, 500])
def test_a_linear_layer_is_torchs_whatever_its_rows_and_threads(
    library: Library, dtype: str, rows: int, out: int
) -> None:
    """With a bias; each row alone gives the same bits."""
    layer = nn.Linear(301, out)
    # The talker's own matrices are int8, a projection's are not; none of the talker's has a bias.
    packed, widened = packed_and_widened(layer, "talker", dtype)
    x = torch.randn(rows, 301)
    got = NativeLinear(packed, library, 1)(x)
    torch.testing.assert_close(got, widened(x), atol=2e-5, rtol=1e-5)
    for threads in (2, 4):
        assert_equal(NativeLinear(packed, library, threads)(x), got)
    for row in (0, rows // 2, rows - 1):
        assert_equal(NativeLinear(packed, library, 1)(x[row]), got[row])


@torch.no_grad()
def test_native_linears_take_the_place_of_all(config: OmniConfig, library: Library) -> None:
    assert config.talker is not None
    projection = ResizeMlp(config.talker)
    packed, widened = packed_and_widened(projection, "text_projection", "int8")
    use_native_linears(packed, library, 1)
    assert isinstance(packed.fc1, NativeLinear) and isinstance(packed.fc2, NativeLinear)
    x = torch.randn(2, 3, config.talker.thinker_hidden_size)
    torch.testing.assert_close(packed(x), widened(x), atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("channels", [5, 32, 40])
def test_audio_convolutions_are_the_modules_whatever_is_beside_a_chunk_and_the_threads(
    config: OmniConfig, library: Library, channels: int
) -> None:
    """Odd numbers of mels and times, too, and chunks that are not filled to their end."""
    for mels, times in ((128, 100), (19, 100), (20, 37)):
        c = dataclasses.replace(
            config.thinker.audio, mel_bins=mels, chunk_mel_frames=times, conv_channels=channels
        )
        encoder = AudioEncoder(c)
        randomize(encoder)
        native = NativeAudioConvolutions(encoder, library, 1)
        for width in {times, times - 1, 9, 2, 1}:
            chunks = torch.randn(3, mels, times)
            chunks[..., width:] = 0
            got = native(chunks, width)
            torch.testing.assert_close(got, encoder.convolve(chunks, width), atol=2e-5, rtol=1e-5)
            assert not got[:, (width + 7) // 8 :].any()
            assert_equal(native(chunks[1:2], width), got[1:2])
            for threads in (2, 4):
                assert_equal(NativeAudioConvolutions(encoder, library, threads)(chunks, width), got)


@torch.no_grad()
def test_what_a_slot_held_before_does_not_matter(config: OmniConfig, library: Library) -> None:
    """NaN beyond its rows, and in the other slots."""
    m = made(config, "thinker", "tiny")
    dirty = copied(m.cache)
    dirty.keys.fill_(float("nan"))
    dirty.values.fill_(float("nan"))
    rows, positions = prompt_rows(m.c, 21)
    one, other = m.native(library), m.native(library, cache=dirty)
    assert_equal(other.prefill(1, 0, rows, positions), one.prefill(1, 0, rows, positions))
    token = torch.tensor([3])
    assert_equal(decode(other, [1], [21], [4.0], token), decode(one, [1], [21], [4.0], token))
    assert dirty.keys[:, [0, 2, 3]].isnan().all()
    assert dirty.keys[:, 1, :, 22:].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", ["tiny", "dense"])
def test_nan_stays_in_its_row_and_slot(
    config: OmniConfig, library: Library, stack: str, dtype: str
) -> None:
    m = made(config, "talker", stack, dtype)
    clean_cache, rows = copied(m.cache), inputs_of(m.c, "talker", 3)
    slots, lengths, positions = [3, 0, 1], [5, 30, 9], [1.0, 2.0, 3.0]
    clean = decode(m.native(library, cache=clean_cache), slots, lengths, positions, rows)
    rows[1] = float("nan")
    got = decode(m.native(library), slots, lengths, positions, rows)
    for ours, theirs in zip(got, clean, strict=True):
        assert_equal(ours[[0, 2]], theirs[[0, 2]])
        assert ours[1].isnan().all()
    assert_equal(m.cache.keys[:, 1:], clean_cache.keys[:, 1:])
    # A prompt: the rows before it, of which two attend together with it.
    m = made(config, "thinker", "tiny", dtype)
    prompt, at = prompt_rows(m.c, 21)
    _, clean_rows = m.native(library).prefill(0, 0, prompt, at)
    prompt[14] = float("nan")
    logits, accepted = m.native(library).prefill(1, 0, prompt, at)
    assert_equal(accepted[:14], clean_rows[:14])
    assert logits.isnan().all()
    assert_equal(m.cache.keys[:, 1, :, :14], m.cache.keys[:, 0, :, :14])
    assert not m.cache.keys[:, [0, 2, 3]].isnan().any()


@torch.no_grad()
def test_several_threads_step_their_own_slots(config: OmniConfig, library: Library) -> None:
    """At once, from a pool of 4: each gives what it gives alone."""
    m = made(config, "talker", "wide", "int8", positions=80)
    rows, _ = prompt_rows(m.c, 80)
    at = torch.arange(80).float().expand(3, -1)

    def run(steps: NativeSteps, slot: int) -> list[tuple[Tensor, ...]]:
        results = [steps.prefill(slot, 0, rows[:50], at[:, :50])]
        for n in range(50, 80):
            results.append(decode(steps, [slot], [n], [float(n)], rows[n : n + 1] + slot))
        return results

    alone = [run(m.native(library, cache=copied(m.cache)), slot) for slot in range(4)]
    shared = m.native(library, 4)
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda s: run(shared, s), range(4)), alone, strict=True):
            for ours, theirs in zip(got, expected, strict=True):
                assert_equal(ours, theirs)


# In a process of its own, where a deadlock meets a deadline: a pool at work, a child that inherits
# it, and many short calls from several threads.
POOL_SCRIPT = """
import faulthandler, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.native.linear import NativeLinear
from qwen3_omni_neuron.cpu.native.matrix import pack_in_c

faulthandler.dump_traceback_later(100, exit=True)

def threads():
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0

library, before = find_library(), threads()
library.grow_pool(4)
torch.manual_seed(0)
linear = torch.nn.Linear(64, 4000, bias=False)  # shared by 32 tasks of some microseconds
linear.weight.data = pack_in_c(linear.weight.data, library)
native, x = NativeLinear(linear, library, 4), torch.randn(3, 64)
with torch.inference_mode():
    expected = NativeLinear(linear, library, 1)(x)

@torch.inference_mode()
def right(calls):
    return all(torch.equal(native(x), expected) for _ in range(calls))

assert right(50)
helpers = threads() - before
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        done = right(200)
        os._exit(0 if done and (helpers == 0 or threads() - 1 == helpers) else 7)
    assert right(200)
    assert os.waitpid(child, 0)[1] == 0
else:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, [500] * 4))
if hasattr(os, "sched_getaffinity"):
    # A helper that leaves its caller's core may go back there later: at once, or on a busy machine
    # as soon as it runs again.
    mine, end_s = os.sched_getaffinity(0), time.monotonic() + 20

    def affinity(task):
        try:
            return os.sched_getaffinity(int(task))
        except ProcessLookupError:  # it has ended since it was listed
            return mine

    while any(affinity(task) != mine for task in os.listdir("/proc/self/task")):
        assert time.monotonic() < end_s
        time.sleep(0.01)
print("helpers", helpers)
"""


@pytest.mark.parametrize("how", ["fork", "threads"])
def test_the_pool_works(how: str, library: Library) -> None:
    """In a forked child, which has helpers of its own, and under 2000 short calls of 4 threads."""
    said = run_python("-c", POOL_SCRIPT, how, timeout_s=150)
    if Path("/proc/self/task").is_dir():
        assert said.split() == ["helpers", "3"]


# ---- the kernels of each kind of processor

KINDS = ("_avx512", "_avx2", "_plain")
Number, Pointer = ctypes.c_int64, ctypes.c_void_p


@pytest.fixture(scope="module")
def exported(library: Library) -> CDLL:
    """The same library, with what it exports beside library.h."""
    return CDLL(str(installed.library_path()))


def kind_in_use(exported: CDLL) -> bytes:
    """The first field of the structure that `kernels` points to."""
    name = ctypes.POINTER(ctypes.c_char_p).in_dll(exported, "kernels").contents.value
    assert name is not None
    return name


@pytest.fixture
def use_kind(exported: CDLL) -> Iterator[Callable[[str], None]]:
    """Take the kernels of another kind; the test is skipped where the processor lacks them."""
    usual = kind_in_use(exported)

    def use(name: str) -> None:
        if not exported.use_kernels(name.encode()):
            pytest.skip(f"this processor has no kernels {name}")
        assert kind_in_use(exported) == name.encode()

    yield use
    assert exported.use_kernels(usual)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 40])
@pytest.mark.parametrize("out", [1, 33, 64, 160])
def test_products_of_all_kinds_agree(
    library: Library, use_kind: Callable[[str], None], dtype: str, rows: int, out: int
) -> None:
    """Those with fused multiplications to the bit, the others within rounding."""
    packed, _ = packed_and_widened(nn.Linear(301, out), "talker", dtype)
    x, results = torch.randn(rows, 301), {}
    for kind in reversed(KINDS):
        use_kind(kind)
        results[kind] = NativeLinear(packed, library, 1)(x)
    assert_equal(results["_avx2"], results["_avx512"])
    torch.testing.assert_close(results["_plain"], results["_avx2"], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head"])
@pytest.mark.parametrize("which", ["thinker", "talker"])
def test_every_kind_runs_prompts_and_steps(
    config: OmniConfig,
    library: Library,
    use_kind: Callable[[str], None],
    kind: str,
    stack: str,
    which: str,
) -> None:
    """Results are the modules', and a prompt in pieces is the whole in each kind, to the bit."""
    m = made(config, which, stack)
    rows, positions = prompt_rows(m.c, 21)
    own, expected_cache = copied(m.cache).slots(1, 2), copied(m.cache)
    expected = m.model.prefill(rows, positions, torch.tensor([20]), PromptCache(own))
    use_kind(kind)
    steps = m.native(library)
    got = steps.prefill(1, 0, rows, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    steps.prefill(2, 0, rows[:5], positions[:, :5])
    pieces = steps.prefill(2, 5, rows[5:], positions[:, 5:])
    assert_equal(pieces[0], got[0])
    inputs, slots, lengths = inputs_of(m.c, which, 3), [3, 0, 1], [5, 30, 21]
    expected_cache.keys[:, 1], expected_cache.values[:, 1] = (
        m.cache.keys[:, 1],
        m.cache.values[:, 1],
    )
    at = [1.0, 2.0, 3.0]
    slot_cache = SlotCache(expected_cache, torch.tensor(slots), torch.tensor(lengths))
    torch.testing.assert_close(
        parts(decode(steps, slots, lengths, at, inputs)),
        parts(m.model.decode(inputs, torch.tensor(at), slot_cache)),
        atol=2e-5,
        rtol=1e-5,
    )


def kernel(exported: CDLL, name: str, *arguments: type) -> Callable[..., None]:
    """Return a function of the kernels in use, by its name in the structure of kernels.h."""
    declared = (NATIVE / "kernels.h").read_text()
    structure = declared[declared.index("typedef struct") : declared.index("} Kernels;")]
    names = ["name", *re.findall(r"\(\*(\w+)\)\(", structure)]
    pointers = ctypes.POINTER(ctypes.c_void_p * len(names)).in_dll(exported, "kernels").contents
    return ctypes.CFUNCTYPE(None, *arguments)(pointers[names.index(name)])


@pytest.mark.parametrize("kind", KINDS)
def test_exponentials_are_within_two_units_in_the_last_place(
    exported: CDLL, use_kind: Callable[[str], None], kind: str
) -> None:
    use_kind(kind)
    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    got = np.empty_like(x)
    kernel(exported, "exponentials", Pointer, Pointer, Number)(
        got.ctypes.data, x.ctypes.data, len(x)
    )
    exact = np.exp(x.astype(np.float64))
    units = np.abs(got - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() < 2, f"e^{x[units.argmax()]} is {units.max()} units off"


@pytest.mark.parametrize("kind", KINDS)
def test_gelu_and_layer_norm_are_torchs(
    exported: CDLL, use_kind: Callable[[str], None], kind: str
) -> None:
    use_kind(kind)
    x = torch.linspace(-9, 9, 10_001)
    y, weight, bias = torch.empty_like(x), torch.randn(10_001), torch.randn(10_001)
    kernel(exported, "gelu", Pointer, Pointer, Number)(y.data_ptr(), x.data_ptr(), len(x))
    exact = nn.functional.gelu(x.double())
    torch.testing.assert_close(y.double(), exact, atol=1e-6, rtol=1e-6)
    norm = kernel(exported, "layer_norm", *[Pointer] * 4, Number, ctypes.c_float)
    norm(*(t.data_ptr() for t in (y, x, weight, bias)), len(x), 1e-5)
    expected = nn.functional.layer_norm(x, (len(x),), weight, bias, 1e-5)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


# ---- the code predictor


def talker_config(config: OmniConfig, **sizes: int) -> TalkerConfig:
    """The tiny checkpoint's, with other sizes of the code predictor."""
    c = config.talker
    assert c is not None
    predictor = dataclasses.replace(c.predictor, **sizes)
    text = dataclasses.replace(c.text, hidden_size=predictor.hidden_size)
    return dataclasses.replace(c, predictor=predictor, text=text)


def random_predictor(c: TalkerConfig, seed: int = 0, embedded: float = 1.0) -> CodePredictor:
    predictor = CodePredictor(c, nn.Embedding(c.text.vocab_size, c.text.hidden_size))
    randomize(predictor, seed, embedded)
    with torch.no_grad():
        predictor.head.mul_(c.predictor.vocab_size**0.5)  # [steps, vocab, hidden]
    return predictor


def both_predictors(
    c: TalkerConfig,
    library: Library,
    predictor: CodePredictor,
    dtype: str = "mixed",
    threads: int = 1,
) -> tuple[NativePredictor, CodePredictor]:
    """In C, and in torch with the same weights."""
    packed, widened = packed_and_widened(predictor, "code_predictor", dtype)
    return NativePredictor(c, packed, library, threads), widened


def native_predictor(c: TalkerConfig, library: Library, seed: int = 0) -> NativePredictor:
    return both_predictors(c, library, random_predictor(c, seed))[0]


def frames(c: TalkerConfig, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, code 0 and uniforms."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, c.predictor.hidden_size, generator=generator)
    code0 = torch.randint(0, c.text.vocab_size, (count,), generator=generator)
    return hidden, code0, torch.rand(count, c.code_groups - 1, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_codes_and_feedback_are_the_modules(
    config: OmniConfig, library: Library, layers: int, seed: int, dtype: str
) -> None:
    c = talker_config(config, layers=layers)
    native, predictor = both_predictors(c, library, random_predictor(c, seed), dtype)
    hidden, code0, _ = frames(c, 20, seed)
    codes, feedback = native(hidden, code0)
    expected_codes, expected_feedback = predictor(hidden, code0)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


ODD_PREDICTOR = {
    "layers": 2, "hidden_size": 50, "heads": 3, "kv_heads": 1, "head_dim": 24, "ffn_width": 41,
    "vocab_size": 75,
}  # fmt: skip
LARGE_PREDICTOR = {
    "layers": 2, "hidden_size": 256, "head_dim": 128, "ffn_width": 768, "vocab_size": 2048,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("rows", [[2], [3, 0, 1]], ids=str)
def test_frames_start_from_rows_of_tables_and_leave_their_feedback_there(
    config: OmniConfig, library: Library, rows: list[int]
) -> None:
    c = talker_config(config)
    native, (hidden, code0, uniforms) = native_predictor(c, library), frames(c, 4)
    feedback, limits = torch.full_like(hidden, 7.0), [0.9, 1.0, 0.5][: len(rows)]
    codes = native.frames(
        rows, code0[rows].tolist(), hidden, feedback, uniforms[rows].numpy(), limits, 20
    )
    expected = native(hidden[rows], code0[rows], uniforms[rows], torch.tensor(limits), 20)
    assert_equal((codes, feedback[rows]), expected)
    assert (feedback[[row for row in range(4) if row not in rows]] == 7).all()
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="there are 4"):
            native.frames([0, wrong], [1, 1], hidden, feedback)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("embedded", [1.0, 1e-3], ids=["", "where eps counts"])
@pytest.mark.parametrize("sizes", [{}, {"layers": 3}, ODD_PREDICTOR, LARGE_PREDICTOR], ids=str)
def test_predicted_logits_are_the_modules(
    config: OmniConfig, library: Library, sizes: dict[str, int], embedded: float, dtype: str
) -> None:
    c = talker_config(config, **sizes)
    native, predictor = both_predictors(
        c, library, random_predictor(c, embedded=embedded), dtype, threads=4
    )
    hidden, code0, _ = frames(c, 4)
    logits = torch.empty(15, 4, c.predictor.vocab_size)
    codes, _ = native(embedded * hidden, code0, logits=logits)
    expected = teacher_forced_logits(predictor, embedded * hidden, codes)
    torch.testing.assert_close(logits.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)
    assert codes[:, 1:].tolist() == logits.argmax(-1).t().tolist()


@torch.no_grad()
@pytest.mark.parametrize("vocab_size", [1, 31, 33])
def test_a_frame_of_an_odd_vocabulary_is_the_modules(
    config: OmniConfig, library: Library, vocab_size: int
) -> None:
    c = talker_config(config, vocab_size=vocab_size)
    native, predictor = both_predictors(c, library, random_predictor(c))
    hidden, code0, uniforms = frames(c, 9)
    limits = top_p_limits([0.9] * 9)
    for how in ((), (uniforms, limits, 7)):
        assert native(hidden, code0, *how)[0].tolist() == predictor(hidden, code0, *how)[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("vocab_size", [64, 300])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(50, 0.8), (50, 1.0), (0, 0.9), (0, 1.0), (5, 0.3), (1, 0.8), (270, 0.9), (999, 0.8)],
)
def test_draws_are_the_samplers(
    config: OmniConfig, library: Library, top_k: int, top_p: float, vocab_size: int
) -> None:
    """3000 draws each: the same code for the same logits and uniform. The module's own logits are
    other by a rounding, which swapped two neighbours in 1 draw of 300,000."""
    c = talker_config(config, layers=2, vocab_size=vocab_size)
    hidden, code0, uniforms = frames(c, 200)
    uniforms[0], uniforms[1] = 0, 1 - 2**-24
    limits = top_p_limits([top_p] * 200)
    logits = torch.empty(15, 200, c.predictor.vocab_size)
    native = native_predictor(c, library)
    codes, _ = native(hidden, code0, uniforms, limits, top_k=top_k, logits=logits)
    for step in range(15):
        expected = sample_top(logits[step], uniforms[:, step], top_k, limits)
        assert codes[:, step + 1].tolist() == expected.tolist(), f"step {step}"


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_frames_are_the_modules(config: OmniConfig, library: Library, dtype: str) -> None:
    c = talker_config(config, layers=3)
    native, predictor = both_predictors(c, library, random_predictor(c), dtype)
    hidden, code0, uniforms = frames(c, 100)
    limits = torch.linspace(0.5, 0.99, 100)  # each slot its own
    codes, feedback = native(hidden, code0, uniforms, limits, top_k=20)
    expected_codes, expected_feedback = predictor(hidden, code0, uniforms, limits, top_k=20)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@torch.no_grad()
def test_of_equal_logits_the_smaller_id_comes_first(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    predictor.head.zero_()
    hidden, code0, _ = frames(c, 1)
    native, _ = both_predictors(c, library, predictor)
    assert native(hidden, code0)[0][0, 1:].tolist() == [0] * 15
    for uniform, code in ((0.0, 0), (0.49, 3), (0.5, 4), (0.51, 4), (0.99, 7)):
        uniforms = torch.full((1, 15), uniform)
        codes, _ = native(hidden, code0, uniforms, top_p_limits([1]), top_k=8)
        assert codes[0, 1:].tolist() == [code] * 15


@torch.no_grad()
@pytest.mark.skipif(not hasattr(CDLL(None), "mallopt"), reason="malloc is not glibc's")
@pytest.mark.parametrize("vocab_size", [64, 300])
@pytest.mark.parametrize("top_k", [50, 0])
def test_nan_gives_codes_of_the_vocabulary(
    config: OmniConfig, library: Library, vocab_size: int, top_k: int
) -> None:
    """Broken weights must not lead outside the tables."""
    c = talker_config(config, vocab_size=vocab_size)
    native = native_predictor(c, library)
    hidden, code0, uniforms = frames(c, 2)
    hidden[0] = float("nan")
    whole, _ = native(hidden[1:], code0[1:], uniforms[1:], top_p_limits([1]), top_k)
    libc = CDLL(None)
    try:
        libc.mallopt(M_PERTURB, 0x7F)  # new memory is full of what are no ids
        codes, _ = native(hidden, code0, uniforms, top_p_limits([1, 1]), top_k)
    finally:
        libc.mallopt(M_PERTURB, 0)
    assert torch.equal(codes[1:], whole)
    assert torch.equal(codes[:, 0], code0)
    assert ((codes[:, 1:] >= 0) & (codes[:, 1:] < vocab_size)).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{"layers": 3}, ODD_PREDICTOR, LARGE_PREDICTOR], ids=str)
def test_a_batch_of_frames_is_each_alone_bit_for_bit(
    config: OmniConfig, library: Library, sizes: dict[str, int], dtype: str
) -> None:
    """By 1, 2 and 4 threads."""
    c = talker_config(config, **sizes)
    packed, _ = packed_and_widened(random_predictor(c), "code_predictor", dtype)
    natives = [NativePredictor(c, packed, library, threads) for threads in (1, 2, 4)]
    hidden, code0, uniforms = frames(c, 7)
    limits = torch.linspace(0.5, 0.9, 7)
    for sampled in (False, True):
        together = natives[0](hidden, code0, *(uniforms, limits) if sampled else ())
        for native in natives[1:]:
            assert_equal(native(hidden, code0, *(uniforms, limits) if sampled else ()), together)
        for slot in range(7):
            own = slice(slot, slot + 1)
            how = (uniforms[own], limits[own]) if sampled else ()
            alone = natives[slot % 3](hidden[own], code0[own], *how)
            assert_equal(alone, tuple(t[own] for t in together))


@torch.no_grad()
def test_two_threads_at_once(config: OmniConfig, library: Library) -> None:
    """Two predictors, and one of them from both threads."""
    c = talker_config(config, layers=3)
    natives = [native_predictor(c, library, seed) for seed in (0, 1)]
    hidden, code0, _ = frames(c, 2)
    alone = [native(hidden, code0) for native in natives]

    def run(which: int) -> bool:
        results = [natives[(which + i) % 2](hidden, code0) for i in range(500)]
        return all(
            torch.equal(got, expected)
            for i, result in enumerate(results)
            for got, expected in zip(result, alone[(which + i) % 2], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, (0, 1)))


@torch.no_grad()
def test_the_weights_outlive_the_module(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    packed, widened = packed_and_widened(random_predictor(c), "code_predictor", "float32")
    hidden, code0, _ = frames(c, 1)
    native, (expected, _) = NativePredictor(c, packed, library), widened(hidden, code0)
    del packed
    _ = [torch.full((15, 64, 64), 1e9) for _ in range(50)]  # over what was freed
    assert torch.equal(native(hidden, code0)[0], expected)


# ---- what it refuses, and what stands in for it


@torch.no_grad()
def test_other_shapes_and_types_are_refused(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    native = native_predictor(c, library)
    hidden, code0, uniforms = frames(c, 2)
    limits = torch.full((2,), 0.8)
    native(hidden, code0, uniforms, limits)
    for wrong in (
        (hidden[:1], code0),
        (hidden[:, :32], code0),
        (hidden.double(), code0),
        (torch.stack((hidden, hidden), -1)[..., 0], code0),  # not dense
        (hidden, code0.int()),
        (hidden, code0, uniforms[:, :14], limits),
        (hidden, code0, uniforms.double(), limits),
        (hidden, code0, uniforms, limits[:1]),
    ):
        with pytest.raises(ValueError, match="the C takes"):
            native(*wrong)
    for code in (-1, c.text.vocab_size):
        with pytest.raises(IndexError, match=str(code)):
            native(hidden, torch.tensor([0, code]))
    m = made(config, "thinker", "tiny")
    steps, (rows, positions) = m.native(library), prompt_rows(m.c, 5)
    visual, features = torch.tensor([1, 3]), torch.randn(2, 2, m.c.hidden_size)
    for wrong_prompt in (
        (rows[:, :32], positions),
        (rows.double(), positions),
        (rows.bfloat16(), positions),
        (rows, positions[:2]),
        (rows, positions[:, :4]),
        (rows, positions.double()),
        (rows, positions, visual.int(), features),
        (rows, positions, visual, features[:, :1]),
        (rows, positions, visual, features.double()),
    ):
        with pytest.raises(ValueError, match="the C takes"):
            steps.prefill(0, 0, *wrong_prompt)
    layer = NativeLinear(packed_and_widened(nn.Linear(3, 5), "talker", "mixed")[0], library, 1)
    with pytest.raises(ValueError, match=r"the C takes torch\.float32"):
        layer(torch.randn(2, 3).double())
    audio = config.thinker.audio
    convolve = NativeAudioConvolutions(AudioEncoder(audio), library, 1)
    chunks = torch.zeros(2, audio.mel_bins, audio.chunk_mel_frames)
    for wrong_chunks in (chunks.double(), chunks[:, 1:], chunks[..., 1:], chunks[0]):
        with pytest.raises(ValueError, match=r"the C takes torch\.float32"):
            convolve(wrong_chunks, 9)
    for width in (0, audio.chunk_mel_frames + 1):
        with pytest.raises(ValueError, match=f"of 1 to {audio.chunk_mel_frames}"):
            convolve(chunks, width)


@torch.no_grad()
def test_weights_in_other_forms_are_refused(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    whole = random_predictor(c)
    with pytest.raises(UnsuitedError, match="float32"):  # not packed
        NativePredictor(c, whole, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    with pytest.raises(UnsuitedError, match=r"bfloat16 \[2, 5, 64, 32\]"):
        NativePredictor(talker_config(config, ffn_width=136), packed, library)
    with pytest.raises(UnsuitedError, match=r"no weights of torch\.float64"):
        packed.head.data = packed.head.double()
        NativePredictor(c, packed, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    packed.head.data = packed.head.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(UnsuitedError, match="dense"):
        NativePredictor(c, packed, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    with pytest.raises(UnsuitedError, match="float32"):  # norms in bfloat16
        NativePredictor(c, packed.bfloat16(), library)
    m = made(config, "talker", "tiny", "int8")
    m.packed.codec_head.weight_scale = m.packed.codec_head.weight_scale[:-1]
    with pytest.raises(UnsuitedError, match="float32"):
        m.native(library)


def test_a_place_outside_the_slots_is_refused(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "tiny")
    steps, row = m.native(library), torch.zeros(1, m.c.hidden_size)
    for slot, length in ((4, 0), (-1, 0), (0, POSITIONS)):
        with pytest.raises(IndexError, match=f"{POSITIONS} of 4"):
            decode(steps, [slot], [length], [0.0], row)
    for start, count in ((0, POSITIONS + 1), (1, POSITIONS), (POSITIONS, 1)):
        with pytest.raises(IndexError, match=f"to {POSITIONS + 1} of slots"):
            steps.prefill(0, start, torch.zeros(count, m.c.hidden_size), torch.zeros(3, count))
    rows, positions = torch.zeros(3, m.c.hidden_size), torch.zeros(3, 3)
    with pytest.raises(IndexError, match="positions"):
        steps.prefill(0, -1, rows, positions)
    with pytest.raises(IndexError, match="positions"):
        decode(steps, [0], [-1], [0.0], row)
    with pytest.raises(ValueError, match="no rows"):
        steps.prefill(0, 3, rows[:0], positions[:, :0])
    thinker = made(config, "thinker", "tiny")
    for visual in ([0, 3], [-1, 0], [1, 0], [1, 1]):
        features = torch.zeros(1, 2, thinker.c.hidden_size)
        prompt = torch.zeros(3, thinker.c.hidden_size), positions
        with pytest.raises(IndexError, match="ascending rows of the 3"):
            thinker.native(library).prefill(0, 0, *prompt, torch.tensor(visual), features)


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Bytes that malloc has given out and not got back, in all threads. Python's small objects are
    not among them."""
    libc = CDLL(None)
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


CALLS = [
    "decode_step", "draw_rows", "prefill", "predict_frame", "multiply_rows", "pack_matrices",
    "run_code2wav", "convolve_audio",
]  # fmt: skip


def every_call(config: OmniConfig, library: Library) -> dict[str, Callable[[], object]]:
    """Each call of the library by its name, with small inputs."""
    c = talker_config(config)
    native = native_predictor(c, library)
    hidden, code0, uniforms = frames(c, 2)
    m = made(config, "thinker", "tiny", "int8")
    steps, tokens, (rows, at) = m.native(library, 4), torch.tensor([5, 6]), prompt_rows(m.c, 21)
    visual, features = torch.tensor([1, 3]), torch.randn(2, 2, m.c.hidden_size)
    layer = NativeLinear(packed_and_widened(nn.Linear(64, 99), "talker", "mixed")[0], library, 4)
    assert config.code2wav is not None
    code2wav, codes = Code2Wav(config.code2wav), torch.zeros(1, 16, 2, dtype=torch.int64)
    vocoder = NativeCode2Wav(code2wav, library)
    _, state = vocoder.start(codes)
    audio = config.thinker.audio
    convolve = NativeAudioConvolutions(AudioEncoder(audio), library, 4)
    chunks = torch.randn(2, audio.mel_bins, audio.chunk_mel_frames)
    sampler = Sampler(SAMPLINGS[0], 3000, RequestRandom(0).talker)
    draws, tokens_logits = NativeDraws(library), torch.randn(1, 3000)
    return {
        "draw_rows": lambda: draws([sampler], [tokens_logits]),
        "decode_step": lambda: decode(steps, [0, 1], [3, 4], [3.0, 4.0], tokens),
        "prefill": lambda: steps.prefill(0, 0, rows, at, visual, features),
        "predict_frame": lambda: native(hidden, code0, uniforms, torch.full((2,), 0.8)),
        "multiply_rows": lambda: layer(rows),
        "pack_matrices": lambda: pack_in_c(hidden, library),
        "run_code2wav": lambda: (vocoder.start(codes), vocoder.step(codes, state)),
        "convolve_audio": lambda: convolve(chunks, audio.chunk_mel_frames),
    }


@torch.no_grad()
@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="malloc is not glibc's of 2.33")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_frees_what_it_allocates(
    config: OmniConfig, library: Library, name: str
) -> None:
    """Counted in malloc itself: a peak of memory hides what is leaked below it."""
    before = allocated_bytes()
    held = ctypes.create_string_buffer(100_000)
    assert allocated_bytes() - before >= len(held), "the measure misses an allocation"
    call, calls = every_call(config, library)[name], 500
    for _ in range(50):  # what torch, malloc and the pool's threads keep for later
        call()
    before = allocated_bytes()
    for _ in range(calls):
        call()
    grown = (allocated_bytes() - before) / calls
    assert grown < 32, f"{grown} bytes a call are left"


@pytest.mark.parametrize("dtype", DTYPES)
def test_replies_are_the_same_without_it(
    checkpoint: Path,
    dtype: str,
    install: Callable[[Path | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch computes with the same weights where it was not compiled, and says so once."""
    messages = [{"role": "user", "content": "What is it?"}]
    with Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1) as omni:
        expected = omni.generate_audio(messages, **GREEDY, **LIMITS)
    install(None)
    with (
        caplog.at_level(logging.WARNING),
        Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=2) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert caplog.text.count("not compiled") == 1

        def answer(_: int) -> None:
            got = other.generate_audio(messages, **GREEDY, **LIMITS)
            assert got.token_ids == expected.token_ids
            assert got.codes.tolist() == expected.codes.tolist()
            assert abs(got.audio - expected.audio).max() < 1e-4

        answer(0)
        assert list(pool.map(answer, range(2))) == [None, None]


# ---- libraries that do not belong to these sources

NATIVE = Path(installed.__file__).parent


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has no single {old!r} to change"
    file.write_text(text.replace(old, new))


FLAGS = ("-fPIC", "-pthread", "-Wno-psabi")
KERNELS = "kernels.o"  # which no test changes, and which takes most of the time


def compile_library(folder: Path) -> Path:
    """Compile the sources of a folder into it, with their digest, as setup.py does."""
    library = folder / "_library.so"
    macro = f"-DSOURCE_DIGEST={source_digest(folder)}"
    sources = [file for file in folder.glob("*.c") if file.name != "kernels.c"]
    sources += folder.glob(KERNELS)
    subprocess.run(["cc", "-shared", *FLAGS, macro, "-o", library, *sources, "-lm"], check=True)
    return library


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cc"):
        pytest.skip("no C compiler, so no other library can be made")
    compiled = tmp_path_factory.mktemp("kernels") / KERNELS
    subprocess.run(["cc", *FLAGS, "-c", "-o", compiled, NATIVE / "kernels.c"], check=True)
    return compiled


@pytest.fixture
def sources(kernels: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the C sources."""
    for file in (*NATIVE.glob("*.c"), *NATIVE.glob("*.h"), kernels):
        shutil.copy(file, tmp_path)
    return tmp_path


def of_another_layout(sources: Path) -> Path:
    old = "    int64_t threads;          /* that a call may use */\n} Stepper;"
    change(sources / "library.h", old, old.replace("threads;", "more, threads;"))
    return compile_library(sources)


def of_fields_in_another_order(sources: Path) -> Path:
    """All sizes are the same."""
    change(sources / "library.h", "int64_t into, out, rate;", "int64_t out, into, rate;")
    return compile_library(sources)


def of_another_constant(sources: Path) -> Path:
    change(sources / "library.h", "NO_SUCH_ROW = 2", "NO_SUCH_ROW = 3")
    return compile_library(sources)


def without_a_call(sources: Path) -> Path:
    for file in ("library.h", "code2wav.c"):
        change(sources / file, "int run_code2wav(", "int run_code2wavs(")
    return compile_library(sources)


def of_older_sources(sources: Path) -> Path:
    """An update without a compiler: sources that do something else, the same declarations."""
    library = compile_library(sources)
    change(sources / "library.h", "DONE = 0", "DONE = 0 /* new */")
    return library


def without_a_digest(sources: Path) -> Path:
    for file in sources.iterdir():
        file.unlink()
    (sources / "old.c").write_text("int decode_step(void) { return 0; }\n")
    return compile_library(sources)


def not_a_library(sources: Path) -> Path:
    path = sources / "_library.so"
    path.write_text("compiled for another machine")
    return path


OTHER_DECLARATIONS = "sources of digest [0-9a-f]{15}, and the Python beside it is for [0-9a-f]{15};"
MISMATCHES: dict[Callable[[Path], Path], str] = {
    of_another_layout: OTHER_DECLARATIONS,
    of_fields_in_another_order: OTHER_DECLARATIONS,
    of_another_constant: OTHER_DECLARATIONS,
    without_a_call: OTHER_DECLARATIONS,
    of_older_sources: "sources of digest [0-9a-f]{15}, and those beside it have [0-9a-f]{15};",
    without_a_digest: "can't be loaded .*source_digest",
    not_a_library: "can't be loaded",
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | None], None]]:
    """Let the package find another library than its own, or none."""

    def replace(library: Path | None) -> None:
        monkeypatch.setattr(installed, "library_path", lambda: library)
        find_library.cache_clear()

    yield replace
    find_library.cache_clear()


@pytest.mark.parametrize("mismatched", MISMATCHES, ids=lambda made: made.__name__)
def test_a_library_of_other_sources_is_refused(
    sources: Path,
    mismatched: Callable[[Path], Path],
    install: Callable[[Path | None], None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With one warning that says what differs and what to do; `doctor` says it, too."""
    install(mismatched(sources))
    assert find_library() is None
    assert find_library() is None
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    for part in (str(sources / "_library.so"), "torch computes the same", "pip install -e ."):
        assert part in record.getMessage()
    expected = re.compile(MISMATCHES[mismatched])
    assert expected.search(record.getMessage())
    assert cli.main(["doctor"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "steps in C" in line)
    assert "compiled, not used" in row
    assert expected.search(row)
    assert "pip install --force-reinstall" in row


def test_a_library_of_these_sources_is_accepted(
    config: OmniConfig, sources: Path, install: Callable[[Path | None], None]
) -> None:
    """Also where an installation was stripped of its sources: the declarations have the digest."""
    library = compile_library(sources)
    load_library(library)
    for file in (*sources.glob("*.c"), *sources.glob("*.h")):
        file.unlink()
    install(library)
    c = talker_config(config)
    accepted = find_library()
    assert accepted is not None
    native_predictor(c, accepted)(*frames(c, 1)[:2])
    stripped_of_another_layout = sources / "other"
    shutil.copytree(NATIVE, stripped_of_another_layout, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(sources / KERNELS, stripped_of_another_layout)
    other = shutil.move(of_another_layout(stripped_of_another_layout), sources / "other.so")
    with pytest.raises(MismatchError, match=OTHER_DECLARATIONS):
        load_library(other)


def test_a_reply_comes_without_a_refused_library(
    checkpoint: Path,
    omni: Qwen3Omni,
    sources: Path,
    install: Callable[[Path | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages = [{"role": "user", "content": "What is it?"}]
    expected = omni.generate_audio(messages, **GREEDY, **LIMITS)
    install(of_another_layout(sources))
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=1) as other:
        got = other.generate_audio(messages, **GREEDY, **LIMITS)
    assert got.token_ids == expected.token_ids
    assert got.codes.tolist() == expected.codes.tolist()
    assert caplog.text.count("is not used") == 1


class CountedLibrary:
    """A library that counts its calls by name."""

    def __init__(self, library: Library) -> None:
        self.calls: Counter[str] = Counter()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def call(*given: object) -> object:
            self.calls[name] += 1
            return function(*given)

        return call


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_a_reply_runs_in_c(
    checkpoint: Path, library: Library, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Every step, prompt, frame and chunk of a reply is one call of the library."""
    counted = CountedLibrary(library)
    monkeypatch.setattr(precision, "find_library", lambda: counted)
    with Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1) as omni:
        # Linear layers have projected the rows of a small vocabulary: none is left to the reply.
        assert counted.calls["multiply_rows"]
        counted.calls.clear()
        reply = omni.generate_audio(
            [{"role": "user", "content": "What is it?"}], **GREEDY, **LIMITS, chunk_frames=[1]
        )
    # The thinker's first token comes from its prompt. Each of the talker's comes from a step: the
    # last row of its prompt waits for the thinker's first token; its last token makes no frame.
    steps_made = (len(reply.token_ids) - 1) + (len(reply.codes) + 1)
    assert counted.calls == {
        "prefill": 2,
        "decode_step": steps_made,
        "predict_frame": len(reply.codes),
        "run_code2wav": len(reply.codes),  # a chunk a frame
    }
