"""bfloat16 matrices in 12 bits a number: the form, its packing, and its products."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.compact import compact_shape, unpack_compact
from qwen3_omni_neuron.cpu.native.binding import Library, pack_compact_in_c
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.packing import pack
from testing.compact_form import EXCEPTIONS, pack_compact
from testing.native_library import KINDS, needs_c
from testing.native_modules import assert_equal


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return weights that are distributed as those of a trained matrix."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def planted(out: int = 70, into: int = 1000, infinite: bool = True) -> Tensor:
    """Return a matrix of extremes: each fits, as a few exceptions or as all of an output."""
    matrix = drawn(out, into)
    matrix[0] = 0.0
    matrix[1] = -0.0
    matrix[2] = 2.0**-133  # denormal
    matrix[3] = 0.02  # equal exponents
    matrix[4, :250:20] = 2.0**100  # 13 in one block, which makes the other numbers fit
    matrix[5, 300] = 2.0**100
    matrix[5, 301:306] = 0.0
    matrix[33, 999] = 2.0**-133
    if infinite:
        matrix[40] = torch.inf
        matrix[41, 500] = torch.nan
        matrix.view(torch.int16)[41, 501] = -63  # NaN with another mantissa
    return matrix


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(whole), b.view(whole))


def test_every_number_and_shape_comes_back() -> None:
    shapes = (1, 4), (33, 300), (64, 256), (2, 3, 40, 516)
    for matrix in (planted(), planted(infinite=False), *(drawn(*shape) for shape in shapes)):
        packed = pack_compact(matrix)
        assert packed is not None and packed.shape == compact_shape(tuple(matrix.shape))
        assert same_bits(unpack_compact(packed, tuple(matrix.shape), torch.bfloat16), matrix)


def test_released_widths_take_three_quarters_of_the_bytes() -> None:
    *_, panels, size = compact_shape((6144, 1024))
    assert panels * size / (6144 * 1024 * 2) == pytest.approx(0.758, abs=5e-4)


@pytest.mark.parametrize("more", [0, 1])
def test_a_matrix_with_more_exceptions_than_a_block_lists_has_no_compact_form(more: int) -> None:
    matrix = torch.ones(32, 512, dtype=torch.bfloat16)
    matrix[3, 300 : 300 + EXCEPTIONS + more] = 0.0
    packed = pack_compact(matrix)
    assert (packed is None) == (more > 0)
    if packed is not None:
        assert same_bits(unpack_compact(packed, (32, 512), torch.bfloat16), matrix)


@needs_c
@pytest.mark.parametrize("seed", range(3))
def test_packing_in_c_gives_the_bytes_of_packing_in_torch(library: Library, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(2**15), 2**15, (40, 260), generator=random, dtype=torch.int16)
    narrow = any_bits & 0x87FF  # exponents 0 to 15
    wider = any_bits & 0x8FFF | torch.where(any_bits % 300 == 0, 0x1000, 0)
    matrices = [planted(), drawn(3, 2, 70, 300, seed=seed), drawn(32, 6)]
    matrices += [bits.view(torch.bfloat16) for bits in (any_bits, narrow, wider.to(torch.int16))]
    found = []
    for matrix in matrices:
        expected, got = pack_compact(matrix), pack_compact_in_c(matrix, library)
        found.append(got is not None)
        assert (expected is None) == (got is None)
        assert expected is None or got is None or torch.equal(got, expected)
    assert found == [True, True, False, False, True, False]


def linears(matrix: Tensor, library: Library, threads: int = 1) -> tuple[NativeLinear, ...]:
    """Return a layer over the plain form, and one over the compact form."""
    made = []
    compact = pack_compact_in_c(matrix, library)
    assert compact is not None
    for weight in (pack(matrix), compact):
        layer = nn.Linear(matrix.shape[1], matrix.shape[0])
        layer.bias.data = torch.linspace(-1, 1, len(matrix))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        made.append(NativeLinear(layer, library, threads))
    return tuple(made)


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [1, 33, 64, 200])
@pytest.mark.parametrize("into", [256, 300, 1028])
def test_products_have_the_bits_of_those_with_the_plain_form(
    library: Library, use_kind: Callable[[str], None], kind: str, out: int, into: int
) -> None:
    use_kind(kind)
    matrix = drawn(out, into)
    matrix[0, 3::17] = 0.0  # exceptions in most quads
    plain, compact = linears(matrix, library)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 40, 103, 200):
        x = torch.randn(rows, into)
        assert_equal(compact(x), plain(x))


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("infinite", [True, False])
def test_extremes_are_multiplied_as_in_the_plain_form(
    library: Library, use_kind: Callable[[str], None], kind: str, infinite: bool
) -> None:
    use_kind(kind)
    plain, compact = linears(planted(infinite=infinite), library, threads=2)
    for rows in (1, 4, 13):
        x = torch.randn(rows, 1000)
        got, expected = compact(x), plain(x)
        assert torch.equal(got.isnan(), expected.isnan())
        assert same_bits(got.nan_to_num(0), expected.nan_to_num(0))


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [9, 64])
@pytest.mark.parametrize("input_of_block", [0, 252])
def test_a_full_list_ends_with_its_head(
    library: Library, use_kind: Callable[[str], None], kind: str, out: int, input_of_block: int
) -> None:
    """The exponents of 0 that follow it in memory would be an exception of the same quad."""
    use_kind(kind)
    matrix = ((torch.rand(out, 512) + 1) * 2.0**-120).bfloat16()
    inputs = [block + input_of_block + i for block in (0, 256) for i in range(4)]
    matrix[: EXCEPTIONS // 4, inputs] = 2.0**60
    plain, compact = linears(matrix, library)
    for rows in (1, 4, 13, 60):
        x = torch.randn(rows, 512)
        assert_equal(compact(x), plain(x))


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_broken_bytes_are_read_within_their_bounds(
    library: Library, use_kind: Callable[[str], None], kind: str
) -> None:
    use_kind(kind)
    shape = compact_shape((32, 300))
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    layer = nn.Linear(300, 32, bias=False)
    for packed in (torch.zeros(shape, dtype=torch.uint8), noise):
        unpack_compact(packed, (32, 300), torch.float32)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        for rows in (1, 60):
            y = NativeLinear(layer, library, 1)(torch.ones(rows, 300))
            assert packed.any() or not y.any(), "zeros are weights of 0"
