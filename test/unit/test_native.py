"""The C kernels against the modules that they replace."""

import ctypes
import dataclasses
import logging
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.binding import MismatchError, Number, Pointer, UnsuitedError
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav
from qwen3_omni_neuron.cpu.native.installed import find_library, load_library
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.sources import source_hash
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor, sample_top, top_p_limits
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker
from testing.teacher_forcing import teacher_forced_logits

# Where there is a compiler there is the library.
pytestmark = pytest.mark.skipif(
    find_library() is None and not shutil.which("cc"), reason="no C compiler, so nothing in C"
)
POSITIONS = 40
M_PERTURB = -6  # of glibc's malloc.h
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}
LIMITS = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 12}


@pytest.fixture(scope="module")
def library() -> CDLL:
    found = find_library()
    assert found is not None, "a compiler is there, and the library is not: pip install -e . -v"
    return found


@torch.no_grad()
def randomize(module: nn.Module, seed: int = 0, embedded: float = 1.0) -> None:
    """Weights that keep the rows' size, norms around 1; embedded: the size of the tables' rows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        weight.normal_(generator=generator)
        if "norm" in name or "magnitude" in name or "frequency" in name:
            weight.mul_(0.1).add_(1)
        elif "embedding" in name:
            weight.mul_(embedded)
        elif name.endswith("down") and weight.ndim == 3:  # [experts, out, in]
            weight.mul_(weight.shape[2] ** -0.5)
        elif weight.ndim > 1:
            weight.mul_((weight.numel() / len(weight)) ** -0.5)


# ---- decode steps and prompts of thinker and talker


def stack_config(c: DecoderConfig, moe: dict[str, object] | None, **sizes: int) -> DecoderConfig:
    """Other sizes than the tiny checkpoint's; moe: None for a dense feed-forward."""
    changed = None if moe is None else dataclasses.replace(c.moe, **moe)
    return dataclasses.replace(c, moe=changed, **sizes)


STACKS: dict[str, tuple[dict[str, object] | None, dict[str, int]]] = {
    "tiny": ({}, {}),
    "dense": (None, {"ffn_width": 96}),
    "odd": (
        {"experts": 5, "experts_per_token": 3, "expert_width": 24, "normalize_weights": False},
        {"heads": 6, "kv_heads": 2, "head_dim": 24, "vocab_size": 77, "layers": 2},
    ),
    "one kv head": ({}, {"heads": 3, "kv_heads": 1, "head_dim": 32, "vocab_size": 6}),
}
Made = tuple[DecoderConfig, Thinker | Talker, KvCache]


def made(config: OmniConfig, which: str, stack: str, slots: int = 4) -> Made:
    moe, sizes = STACKS[stack]
    model: Thinker | Talker
    if which == "thinker":
        thinker = config.thinker
        c = stack_config(thinker.text, moe, **sizes)
        model = Thinker(dataclasses.replace(thinker, text=c), accept_layer=1)
    else:
        assert config.talker is not None
        c = stack_config(config.talker.text, moe, **sizes)
        model = Talker(dataclasses.replace(config.talker, text=c))
    randomize(model)
    cache = KvCache.zeros(c, slots, POSITIONS, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    return c, model, cache


def copied(cache: KvCache) -> KvCache:
    return KvCache(cache.keys.clone(), cache.values.clone())


def inputs_of(c: DecoderConfig, which: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if which == "thinker":
        return torch.randint(0, c.vocab_size, (count,), generator=generator)
    return torch.randn(count, c.hidden_size, generator=generator)


def parts(outputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("slots", [[2], [3, 0, 1], [0, 1, 2, 3]], ids=str)
def test_a_decode_step_is_the_modules(
    config: OmniConfig, library: CDLL, which: str, stack: str, slots: list[int]
) -> None:
    """Outputs and what is left in the cache, with slots at places of their own."""
    c, model, cache = made(config, which, stack)
    expected_cache, inputs = copied(cache), inputs_of(c, which, len(slots))
    lengths = [3 + 11 * slot for slot in slots]
    positions = [length + 2.5 for length in lengths]
    got = NativeSteps(c, model, cache, library).decode(slots, lengths, positions, inputs)
    slot_cache = SlotCache(expected_cache, torch.tensor(slots), torch.tensor(lengths))
    expected = model.decode(inputs, torch.tensor(positions), slot_cache)
    torch.testing.assert_close(parts(got), parts(expected), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(cache.keys, expected_cache.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.values, expected_cache.values, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("count", [1, 2, 21])
def test_a_prompt_is_the_modules(
    config: OmniConfig, library: CDLL, which: str, stack: str, count: int
) -> None:
    """Logits of its last row, the accept layer's or the last hidden state, and its slot; with three
    axes that disagree. A step goes on from it."""
    c, model, cache = made(config, which, stack)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(count, c.hidden_size, generator=generator)
    positions = torch.randint(0, 90, (count, 3), generator=generator).float().t()  # not dense
    line = copied(cache).slots(1, 2)
    last = torch.tensor([count - 1])
    expected = model.prefill(rows, positions, last, PromptCache(line))
    steps = NativeSteps(c, model, cache, library)
    got = steps.prefill(1, rows, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(cache.keys[:, 1], line.keys[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.values[:, 1], line.values[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("which", ["thinker", "talker"])
def test_a_step_of_several_slots_is_each_alone_bit_for_bit(
    config: OmniConfig, library: CDLL, which: str
) -> None:
    c, model, cache = made(config, which, "tiny")
    alone_cache, inputs = copied(cache), inputs_of(c, which, 3)
    together = parts(
        NativeSteps(c, model, cache, library).decode([3, 0, 1], [5, 30, 9], [1.0, 2, 3], inputs)
    )
    alone = NativeSteps(c, model, alone_cache, library)
    for row, (slot, length) in enumerate(((3, 5), (0, 30), (1, 9))):
        own = parts(alone.decode([slot], [length], [row + 1.0], inputs[row : row + 1]))
        assert all(torch.equal(a[0], t[row]) for a, t in zip(own, together, strict=True))
    assert torch.equal(cache.keys, alone_cache.keys)


def test_a_place_outside_the_lines_is_refused(config: OmniConfig, library: CDLL) -> None:
    c, model, cache = made(config, "talker", "tiny")
    steps, row = NativeSteps(c, model, cache, library), torch.zeros(1, c.hidden_size)
    for slot, length in ((4, 0), (-1, 0), (0, POSITIONS)):
        with pytest.raises(IndexError, match=f"{POSITIONS} of 4"):
            steps.decode([slot], [length], [0.0], row)
    with pytest.raises(IndexError, match=f"{POSITIONS + 1} positions"):
        steps.prefill(0, torch.zeros(POSITIONS + 1, c.hidden_size), torch.zeros(3, POSITIONS + 1))


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


def frames(c: TalkerConfig, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, code 0 and uniforms."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, c.predictor.hidden_size, generator=generator)
    code0 = torch.randint(0, c.text.vocab_size, (count,), generator=generator)
    return hidden, code0, torch.rand(count, c.code_groups - 1, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_codes_and_feedback_are_the_modules(
    config: OmniConfig, library: CDLL, layers: int, seed: int
) -> None:
    c = talker_config(config, layers=layers)
    predictor = random_predictor(c, seed)
    hidden, code0, _ = frames(c, 20, seed)
    codes, feedback = NativePredictor(c, predictor, library)(hidden, code0)
    expected_codes, expected_feedback = predictor(hidden, code0)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("embedded", [1.0, 1e-3], ids=["", "where eps counts"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"layers": 3},
        {"layers": 2, "kv_heads": 1, "head_dim": 24, "ffn_width": 40, "vocab_size": 75},
        {"layers": 2, "hidden_size": 256, "head_dim": 128, "ffn_width": 768, "vocab_size": 2048},
    ],
    ids=str,
)
def test_predicted_logits_are_the_modules(
    config: OmniConfig, library: CDLL, sizes: dict[str, int], embedded: float
) -> None:
    c = talker_config(config, **sizes)
    predictor = random_predictor(c, embedded=embedded)
    hidden, code0, _ = frames(c, 4)
    logits = torch.empty(15, 4, c.predictor.vocab_size)
    codes, _ = NativePredictor(c, predictor, library)(embedded * hidden, code0, logits=logits)
    expected = teacher_forced_logits(predictor, embedded * hidden, codes)
    torch.testing.assert_close(logits.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)
    assert codes[:, 1:].tolist() == logits.argmax(-1).t().tolist()


@torch.no_grad()
@pytest.mark.parametrize("vocab_size", [64, 300])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(50, 0.8), (50, 1.0), (0, 0.9), (0, 1.0), (5, 0.3), (1, 0.8), (270, 0.9), (999, 0.8)],
)
def test_draws_are_the_samplers(
    config: OmniConfig, library: CDLL, top_k: int, top_p: float, vocab_size: int
) -> None:
    """3000 draws each: the same code for the same logits and uniform. The module's own logits are
    other by a rounding, which swapped two neighbours in 1 draw of 300,000."""
    c = talker_config(config, layers=2, vocab_size=vocab_size)
    hidden, code0, uniforms = frames(c, 200)
    uniforms[0], uniforms[1] = 0, 1 - 2**-24
    limits = top_p_limits([top_p] * 200)
    logits = torch.empty(15, 200, c.predictor.vocab_size)
    native = NativePredictor(c, random_predictor(c), library)
    codes, _ = native(hidden, code0, uniforms, limits, top_k=top_k, logits=logits)
    for step in range(15):
        expected = sample_top(logits[step], uniforms[:, step], top_k, limits)
        assert codes[:, step + 1].tolist() == expected.tolist(), f"step {step}"


@torch.no_grad()
def test_sampled_frames_are_the_modules(config: OmniConfig, library: CDLL) -> None:
    c = talker_config(config, layers=3)
    predictor = random_predictor(c)
    hidden, code0, uniforms = frames(c, 100)
    limits = torch.linspace(0.5, 0.99, 100)  # each slot its own
    native = NativePredictor(c, predictor, library)
    codes, feedback = native(hidden, code0, uniforms, limits, top_k=20)
    expected_codes, expected_feedback = predictor(hidden, code0, uniforms, limits, top_k=20)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@torch.no_grad()
def test_of_equal_logits_the_smaller_id_comes_first(config: OmniConfig, library: CDLL) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    predictor.head.zero_()
    hidden, code0, _ = frames(c, 1)
    native = NativePredictor(c, predictor, library)
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
    config: OmniConfig, library: CDLL, vocab_size: int, top_k: int
) -> None:
    """Broken weights must not lead outside the tables."""
    c = talker_config(config, vocab_size=vocab_size)
    native = NativePredictor(c, random_predictor(c), library)
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
def test_a_batch_of_frames_is_each_alone_bit_for_bit(config: OmniConfig, library: CDLL) -> None:
    c = talker_config(config, layers=3)
    native = NativePredictor(c, random_predictor(c), library)
    hidden, code0, uniforms = frames(c, 7)
    limits = torch.linspace(0.5, 0.9, 7)
    for sampled in (False, True):
        codes, feedback = native(hidden, code0, *(uniforms, limits) if sampled else ())
        for slot in range(7):
            own = slice(slot, slot + 1)
            how = (uniforms[own], limits[own]) if sampled else ()
            alone_codes, alone_feedback = native(hidden[own], code0[own], *how)
            assert torch.equal(alone_codes, codes[own])
            assert torch.equal(alone_feedback, feedback[own])


@torch.no_grad()
def test_two_threads_at_once(config: OmniConfig, library: CDLL) -> None:
    """Two predictors, and one of them from both threads."""
    c = talker_config(config, layers=3)
    natives = [NativePredictor(c, random_predictor(c, seed), library) for seed in (0, 1)]
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
def test_the_weights_outlive_the_module(config: OmniConfig, library: CDLL) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    hidden, code0, _ = frames(c, 1)
    native, (expected, _) = NativePredictor(c, predictor, library), predictor(hidden, code0)
    del predictor
    _ = [torch.full((15, 64, 64), 1e9) for _ in range(50)]  # over what was freed
    assert torch.equal(native(hidden, code0)[0], expected)


# ---- the functions of kernels.h that are not torch's


def test_exponentials_are_within_two_units_in_the_last_place(library: CDLL) -> None:
    function = library["exponential"]  # a new object, whose types are this test's
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    got = np.array([function(float(number)) for number in x])
    exact = np.exp(x.astype(np.float64))
    units = np.abs(got - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() < 2, f"e^{x[units.argmax()]} is {units.max()} units off"


@pytest.mark.parametrize("largest", [10.0, 3000.0])
def test_squared_sines_are_exact_far_from_zero(library: CDLL, largest: float) -> None:
    """A `snake` of so large a magnitude that x adds nothing."""
    x, magnitude = np.linspace(-largest, largest, 100_000).astype(np.float32), 2.0**30
    y, padded = np.empty(len(x) + 32, np.float32), np.pad(x, (0, 32))  # see MORE_SAMPLES
    function = library["snake"]
    function.argtypes = [Pointer, Pointer, ctypes.c_float, ctypes.c_float, Number]
    function(y.ctypes.data, padded.ctypes.data, 1.0, magnitude, len(x))
    got = (y[: len(x)].astype(np.float64) - x) / magnitude
    error = np.abs(got - np.sin(x.astype(np.float64)) ** 2)
    assert error.max() < 4e-7, f"sin({x[error.argmax()]})^2 is {error.max()} off"


# ---- what it refuses, and what stands in for it


@torch.no_grad()
def test_other_shapes_and_types_are_refused(config: OmniConfig, library: CDLL) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    native = NativePredictor(c, predictor, library)
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
    for other in (
        talker_config(config, layers=1, head_dim=20, heads=4),
        talker_config(config, ffn_width=132),
        talker_config(config, hidden_size=60),
    ):
        with pytest.raises(UnsuitedError, match="multiples of 8"):
            NativePredictor(other, random_predictor(other), library)
    with pytest.raises(UnsuitedError, match="float32"):
        NativePredictor(talker_config(config, ffn_width=136), predictor, library)
    predictor.head.data = predictor.head.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsuitedError, match="dense"):
        NativePredictor(c, predictor, library)
    with pytest.raises(UnsuitedError, match="float32"):
        NativePredictor(c, random_predictor(c).bfloat16(), library)


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


def every_call(config: OmniConfig, library: CDLL) -> dict[str, Callable[[], object]]:
    """Each call of the library by its name, with small inputs."""
    c = talker_config(config)
    native = NativePredictor(c, random_predictor(c), library)
    hidden, code0, uniforms = frames(c, 2)
    stack, model, cache = made(config, "talker", "tiny")
    steps, rows = NativeSteps(stack, model, cache, library), inputs_of(stack, "talker", 2)
    assert config.code2wav is not None
    code2wav, codes = Code2Wav(config.code2wav), torch.zeros(1, 16, 2, dtype=torch.int64)
    vocoder = NativeCode2Wav(code2wav, library)
    _, state = vocoder.start(codes)
    return {
        "decode_step": lambda: steps.decode([0, 1], [3, 4], [3.0, 4.0], rows),
        "prefill": lambda: steps.prefill(0, rows, torch.zeros(3, 2)),
        "predict_frame": lambda: native(hidden, code0, uniforms, torch.full((2,), 0.8)),
        "run_code2wav": lambda: (vocoder.start(codes), vocoder.step(codes, state)),
    }


@torch.no_grad()
@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="malloc is not glibc's of 2.33")
@pytest.mark.parametrize("name", ["decode_step", "prefill", "predict_frame", "run_code2wav"])
def test_every_call_frees_what_it_allocates(config: OmniConfig, library: CDLL, name: str) -> None:
    """Counted in malloc itself: a peak of memory hides what is leaked below it."""
    before = allocated_bytes()
    held = ctypes.create_string_buffer(100_000)
    assert allocated_bytes() - before >= len(held), "the measure misses an allocation"
    call, calls = every_call(config, library)[name], 500
    for _ in range(50):  # what torch and malloc keep for later
        call()
    before = allocated_bytes()
    for _ in range(calls):
        call()
    grown = (allocated_bytes() - before) / calls
    assert grown < 32, f"{grown} bytes a call are left"


@pytest.mark.parametrize("library", ["missing", "for others"])
def test_replies_are_the_same_without_it(
    checkpoint: Path,
    omni: Qwen3Omni,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was not compiled, or it can't take the weights."""

    def refuse(*_: object) -> None:
        raise UnsuitedError("it takes others")

    expected_log = "not compiled"
    if library == "missing":
        monkeypatch.setattr(installed, "find_library", lambda: None)
    else:
        for name in ("NativeSteps", "NativePredictor", "NativeCode2Wav"):
            monkeypatch.setattr(installed, name, refuse)
        expected_log = "it takes others"
    messages = [{"role": "user", "content": "What is it?"}]
    expected = omni.generate_audio(messages, **GREEDY, **LIMITS)
    with (
        caplog.at_level(logging.INFO),
        Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=2) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert caplog.text.count(expected_log) == 4  # thinker, talker, code predictor, code2wav

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


def compile_library(folder: Path) -> Path:
    """Compile the sources of a folder into it, with their hash, as setup.py does."""
    library = folder / "_library.so"
    macro = f'-DSOURCE_HASH="{source_hash(folder)}"'
    flags = ["-shared", "-fPIC", "-Wno-psabi", macro, "-o", library]
    subprocess.run(["cc", *flags, *folder.glob("*.c"), "-lm"], check=True)
    return library


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a copy of the C sources."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler, so no other library can be made")
    for file in (*NATIVE.glob("*.c"), *NATIVE.glob("*.h")):
        shutil.copy(file, tmp_path)
    return tmp_path


def of_another_layout(sources: Path) -> Path:
    change(sources / "steps.c", "int64_t vocab;", "int64_t more, vocab;")
    return compile_library(sources)


def of_fields_in_another_order(sources: Path) -> Path:
    """All sizes are the same."""
    change(sources / "wave.h", "int64_t into, out, rate;", "int64_t out, into, rate;")
    return compile_library(sources)


def of_another_constant(sources: Path) -> Path:
    change(sources / "status.h", "NO_SUCH_CODE = 2", "NO_SUCH_CODE = 3")
    return compile_library(sources)


def without_a_call(sources: Path) -> Path:
    change(sources / "code2wav.c", "int run_code2wav(", "int run_code2wavs(")
    return compile_library(sources)


def of_older_sources(sources: Path) -> Path:
    """An update without a compiler: sources that do something else, the same structs."""
    library = compile_library(sources)
    change(sources / "status.h", "DONE = 0", "DONE = 0 /* new */")
    return library


def without_a_hash(sources: Path) -> Path:
    for file in sources.iterdir():
        file.unlink()
    (sources / "old.c").write_text("int decode_step(void) { return 0; }\n")
    return compile_library(sources)


def not_a_library(sources: Path) -> Path:
    path = sources / "_library.so"
    path.write_text("compiled for another machine")
    return path


MISMATCHES: dict[Callable[[Path], Path], str] = {
    of_another_layout: "Stepper is 168 in the library and 160 here, Stepper.vocab .* 1 more;",
    of_fields_in_another_order: "Block.into is 8 in the library and 0 here, Block.out is 0 in",
    of_another_constant: "NO_SUCH_CODE is 3 in the library and 2 here",
    without_a_call: "another version .*run_code2wav",
    of_older_sources: "sources of hash [0-9a-f]{16}, and those beside it have [0-9a-f]{16};",
    without_a_hash: "another version .*source_hash",
    not_a_library: "can't be loaded",
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Let the package find another library than its own."""

    def replace(library: Path) -> None:
        monkeypatch.setattr(installed, "library_path", lambda: library)
        find_library.cache_clear()

    yield replace
    find_library.cache_clear()


@pytest.mark.parametrize("mismatched", MISMATCHES, ids=lambda made: made.__name__)
def test_a_library_of_other_sources_is_refused(
    sources: Path,
    mismatched: Callable[[Path], Path],
    install: Callable[[Path], None],
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
    config: OmniConfig, sources: Path, install: Callable[[Path], None]
) -> None:
    """Also where an installation was stripped of the sources, as layouts can still be compared."""
    library = compile_library(sources)
    load_library(library)
    for file in (*sources.glob("*.c"), *sources.glob("*.h")):
        file.unlink()
    install(library)
    c = talker_config(config)
    assert installed.native_predictor(c, random_predictor(c)) is not None
    stripped_of_another_layout = sources / "other"
    shutil.copytree(NATIVE, stripped_of_another_layout, ignore=shutil.ignore_patterns("*.so"))
    other = shutil.move(of_another_layout(stripped_of_another_layout), sources / "other.so")
    with pytest.raises(MismatchError, match="Stepper is 168"):
        load_library(other)


def test_a_reply_comes_without_a_refused_library(
    checkpoint: Path,
    omni: Qwen3Omni,
    sources: Path,
    install: Callable[[Path], None],
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

    def __init__(self, library: CDLL) -> None:
        self.calls: Counter[str] = Counter()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def call(*given: object) -> object:
            self.calls[name] += 1
            return function(*given)

        return call


def test_a_reply_in_float32_runs_in_c(
    checkpoint: Path, library: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step, prompt, frame and chunk of a reply is one call of the library."""
    counted = CountedLibrary(library)
    monkeypatch.setattr(installed, "find_library", lambda: counted)
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=1) as omni:
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
