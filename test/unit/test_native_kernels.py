"""The kernels of each kind of processor."""

import ctypes
import re
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptCache, SlotCache
from testing.native_library import KINDS, needs_c
from testing.native_modules import (
    DTYPES,
    assert_equal,
    copied,
    decode,
    inputs_of,
    made,
    parts,
    prompt_rows,
)
from testing.packed import packed_and_widened

pytestmark = needs_c
NATIVE = Path(installed.__file__).parent
Number, Pointer = ctypes.c_int64, ctypes.c_void_p


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 40])
@pytest.mark.parametrize("out", [1, 33, 48, 160])
@pytest.mark.pairs
def test_products_of_all_kinds_agree(
    library: Library, use_kind: Callable[[str], None], dtype: str, rows: int, out: int
) -> None:
    """To the bit with fused multiplications or integers, else within rounding."""
    packed, _ = packed_and_widened(nn.Linear(301, out), "talker", dtype)
    x, results = torch.randn(rows, 301), {}
    for kind in reversed(KINDS):
        use_kind(kind)
        results[kind] = NativeLinear(packed, library, 1)(x)
    for kind in ("_vnni_avx512", "_avx512"):
        assert_equal(results[kind], results["_avx2"])
    close = 0.0 if dtype in ("int8", "int4") and out > 1 else 1e-5
    torch.testing.assert_close(results["_plain"], results["_avx2"], atol=close, rtol=close)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_many_inputs_are_the_same_for_any_rows(
    library: Library, use_kind: Callable[[str], None], dtype: str, kind: str
) -> None:
    use_kind(kind)
    packed, widened = packed_and_widened(nn.Linear(4500, 40), "thinker", dtype)
    native, x = NativeLinear(packed, library, 1), torch.randn(1100, 4500)
    got = native(x)
    torch.testing.assert_close(got, widened(x), atol=1e-4, rtol=1e-4)
    for row in (0, 5, 1023, 1024, 1099):
        assert_equal(native(x[row]), got[row])
    assert_equal(native(x[:13]), got[:13])


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
    expected_cache.keys[:, 1] = m.cache.keys[:, 1]
    expected_cache.values[:, 1] = m.cache.values[:, 1]
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
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 32])
@pytest.mark.parametrize("width", [8, 24, 64, 128])
@pytest.mark.pairs
def test_attention_is_that_of_torch_for_queries_that_see_other_positions_each(
    exported: CDLL, use_kind: Callable[[str], None], kind: str, count: int, width: int
) -> None:
    use_kind(kind)
    attend = kernel(exported, "attend", *[Pointer] * 4, Number, *[Pointer] * 2, Number, Pointer)
    keys, values = torch.randn(2, 70, width)
    queries, scratch = torch.randn(count, width), torch.empty(count * (70 + 16))
    from_to = torch.stack((torch.arange(count), 70 - torch.arange(count)))
    mixed = torch.full((count, width), 7.0)
    rows = ((Pointer * count)(*(row.data_ptr() for row in tensor)) for tensor in (mixed, queries))
    bounds = (bound.data_ptr() for bound in from_to)
    attend(*rows, *bounds, count, keys.data_ptr(), values.data_ptr(), width, scratch.data_ptr())
    scores = queries @ keys.T / width**0.5
    places = torch.arange(70)
    unseen = (places < from_to[0][:, None]) | (places >= from_to[1][:, None])
    expected = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
