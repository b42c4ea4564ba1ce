"""Products with int4 matrices: of any group and type of scales, as files have them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qwen3_omni_neuron.cpu.native.binding import Library, quantise_in_c
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.packing import Groups, pack, pack_groups, quantise_groups, unpack_groups
from qwen3_omni_neuron.cpu.precision import WeightForm
from qwen3_omni_neuron.cpu.rounded_inputs import round_inputs
from qwen3_omni_neuron.cpu.weights import put_kept
from testing.native_library import KINDS, needs_c
from testing.native_modules import assert_equal

pytestmark = needs_c
FORMATS = [
    Groups(size, scale)
    for size in (32, 64, 128)
    for scale in (torch.float32, torch.bfloat16, torch.float16)
]


EVERY_FORMAT = pytest.mark.parametrize("groups", FORMATS, ids=str)


def int4_linear(out: int, into: int, groups: Groups, seed: int = 0) -> tuple[nn.Linear, nn.Linear]:
    """A layer for the C with every number from -8 to 7, and one for torch with the same weights."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-into // groups.size)
    numbers = torch.randint(-8, 8, (out, into), generator=generator, dtype=torch.int8)
    scale = (torch.randn(out, count, generator=generator) * 0.01).to(groups.scale)
    assert (scale < 0).any() or scale.numel() < 9
    wide = numbers.double() * scale.double().repeat_interleave(groups.size, 1)[:, :into]
    packed, widened = nn.Linear(into, out), nn.Linear(into, out).double()
    packed.bias.data = torch.randn(out, generator=generator)
    widened.weight.data, widened.bias.data = wide, packed.bias.double()
    blocks = pack_groups(numbers, scale, groups)
    assert torch.equal(unpack_groups(blocks, out, into, groups).double(), wide.float().double())
    packed.weight = nn.Parameter(blocks, requires_grad=False)
    packed.weight_groups = groups
    return packed, widened


@torch.no_grad()
@EVERY_FORMAT
@pytest.mark.parametrize("out", [1, 33, 160])
@pytest.mark.parametrize("into", [256, 301])
@pytest.mark.pairs
def test_products_of_all_kinds_are_torchs_over_the_weights(
    library: Library, use_kind: Callable[[str], None], groups: Groups, out: int, into: int
) -> None:
    packed, widened = int4_linear(out, into, groups)
    for rows in (1, 3, 5, 12, 13, 40):
        x, results = torch.randn(rows, into), {}
        for kind in reversed(KINDS):
            use_kind(kind)
            results[kind] = NativeLinear(packed, library, 1)(x)
            expected = widened(round_inputs(x, 127).double()).float()
            torch.testing.assert_close(results[kind], expected, atol=1e-5, rtol=1e-5)
            assert_equal(results[kind], results["_plain"])


@torch.no_grad()
@EVERY_FORMAT
@pytest.mark.parametrize("out", [31, 64, 500])
@pytest.mark.pairs
def test_a_row_has_the_same_bits_whatever_the_rows_and_threads(
    library: Library, groups: Groups, out: int
) -> None:
    packed, _ = int4_linear(out, 301, groups)
    x = torch.randn(100, 301)
    expected = NativeLinear(packed, library, 1)(x)
    for threads, rows in itertools.product((1, 4), (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 100)):
        assert_equal(NativeLinear(packed, library, threads)(x[-rows:]), expected[-rows:])


@torch.no_grad()
@pytest.mark.parametrize("size", [96, 1536, 4512])
def test_many_inputs_are_taken_in_whole_groups(library: Library, size: int) -> None:
    packed, widened = int4_linear(33, 4500, Groups(size))
    native, x = NativeLinear(packed, library, 1), torch.randn(20, 4500)
    got = native(x)
    expected = widened(round_inputs(x, 127).double()).float()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for row in (0, 19):
        assert_equal(native(x[row]), got[row])


@torch.no_grad()
@pytest.mark.parametrize("limit", [127, 4095])
@pytest.mark.parametrize("size", [2.0**-126, 2.0**-101, 2.0**-99, 1.0, 2.0**110])
def test_inputs_of_any_size_are_rounded_as_in_torch(
    library: Library, use_kind: Callable[[str], None], limit: int, size: float
) -> None:
    """By the unit matrix, which shows them; of many ties, and zeros alone."""
    x = torch.randn(4, 96) * size
    x[1] = torch.randint(-limit, limit + 1, (96,)) / 2 * size
    x[1, ::32] = limit * size
    x[2, 32:64] = 0
    one = nn.Linear(96, 96, bias=False)
    if limit == 127:
        blocks = pack_groups(torch.eye(96).char(), torch.ones(96, 3).bfloat16(), Groups())
        put_kept(one, "weight", WeightForm("int4", torch.bfloat16, (96, 96)), {"weight": blocks})
    else:
        kept = {"weight": pack(torch.eye(96).char()), "weight_scale": torch.ones(96)}
        put_kept(one, "weight", WeightForm("int8", torch.bfloat16, (96, 96)), kept)
    for kind in KINDS:
        use_kind(kind)
        assert_equal(NativeLinear(one, library, 1)(x), round_inputs(x, limit))


@torch.no_grad()
@pytest.mark.parametrize("rows", [5, 20])
def test_nan_stays_in_its_row(library: Library, rows: int) -> None:
    """Inputs are not read beyond their number, which is no multiple of 8."""
    packed, _ = int4_linear(40, 37, Groups())
    x = torch.randn(rows, 37)
    expected = NativeLinear(packed, library, 1)(x)
    x[2] = float("nan")
    got = NativeLinear(packed, library, 1)(x)
    assert got[2].isnan().all()
    others = [row for row in range(rows) if row != 2]
    assert_equal(got[others], expected[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_rounding_in_c_gives_the_bytes_of_rounding_in_torch(
    library: Library, use_kind: Callable[[str], None], kind: str, size: int
) -> None:
    use_kind(kind)
    generator = torch.Generator().manual_seed(size)
    matrix = torch.randn(2, 45, 300, generator=generator)
    matrix[0, 3], matrix[0, 5, :size] = 0, 1
    matrix[1, 0] *= 1e-30
    matrix[1, 1] *= 1e15
    matrix[1, 2] = torch.randint(-4, 5, (300,), generator=generator)
    matrix[1, 3, 1] = 1e4
    stack, groups = matrix.bfloat16(), Groups(size)
    expected = pack_groups(*quantise_groups(stack, groups), groups)
    assert torch.equal(quantise_in_c(stack, library, groups), expected)
