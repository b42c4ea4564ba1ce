"""Matrices whose groups have inputs from anywhere, as files of GPTQ have them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native.binding import Library, UnsuitedError
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.packing import (
    Groups,
    in_own_order,
    pack,
    pack_groups,
    pack_mixed_groups,
    unpack_groups,
)
from qwen3_omni_neuron.cpu.precision import ORDER, PRECISIONS, weight_form
from qwen3_omni_neuron.cpu.weights import put_kept
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptCache
from qwen3_omni_neuron.model.moe import SCALE
from testing.native_library import KINDS, needs_c
from testing.native_modules import (
    Made,
    assert_equal,
    copied,
    decode,
    inputs_of,
    made,
    parts,
    prompt_rows,
)

ZEROS = Groups(64, torch.float16, zero_points=True)


def drawn_numbers(
    *shape: int, groups: Groups, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Numbers, scale, group of each input and zero points of a matrix; and its weights, float64."""
    *stack, out, into = shape
    generator = torch.Generator().manual_seed(seed)
    count = -(-into // groups.size)
    numbers = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scale = (torch.randn(*stack, out, count, generator=generator) * 0.01).to(groups.scale)
    places = torch.rand(*stack, into, generator=generator).argsort(-1)
    group_of = places // groups.size
    zeros, wide = None, numbers.double()
    index = group_of.unsqueeze(-2).expand(shape)
    if groups.zero_points:
        zeros = torch.randint(-8, 9, scale.shape, generator=generator, dtype=torch.int8)
        wide -= zeros.double().gather(-1, index)
    return numbers, scale, group_of, zeros, wide * scale.double().gather(-1, index)


def mixed_linear(out: int, into: int, groups: Groups | None) -> tuple[nn.Linear, nn.Linear]:
    """A layer for the C, and one for torch with the same weights; groups: None for int8."""
    packed, widened = nn.Linear(into, out), nn.Linear(into, out).double()
    widened.bias.data = packed.bias.double()
    if groups is None:
        generator = torch.Generator().manual_seed(into)
        numbers = torch.randint(-127, 128, (out, into), generator=generator, dtype=torch.int8)
        order = torch.randperm(into, generator=generator).int()
        scale = torch.rand(out, generator=generator) * 0.01
        packed.weight = nn.Parameter(pack(numbers), requires_grad=False)
        packed.register_buffer("weight" + SCALE, scale)
        widened.weight.data = in_own_order(numbers.double() * scale.double()[:, None], order)
    else:
        numbers, scale, group_of, zeros, widened.weight.data = drawn_numbers(
            out, into, groups=groups
        )
        blocks, found = pack_mixed_groups(numbers, scale, groups, group_of, zeros)
        assert found is not None
        packed.weight, order = nn.Parameter(blocks, requires_grad=False), found
        packed.weight_groups = groups
    packed.register_buffer("weight" + ORDER, order)
    return packed, widened


EVERY_TYPE = pytest.mark.parametrize(
    "groups",
    [None, Groups(), Groups(128, torch.float32), ZEROS],
    ids=["int8", "32", "128", "zeros"],
)


@pytest.mark.parametrize("groups", [Groups(), ZEROS, Groups(128)])
@pytest.mark.parametrize("shape", [(40, 136), (3, 5, 300), (2, 2, 33, 130)])
def test_packed_by_group_a_matrix_has_its_weights(groups: Groups, shape: tuple[int, ...]) -> None:
    numbers, scale, group_of, zeros, wide = drawn_numbers(*shape, groups=groups)
    packed, order = pack_mixed_groups(numbers, scale, groups, group_of, zeros)
    assert order is not None and order.dtype == torch.int32
    assert order.shape == (*shape[:-2], shape[-1])
    got = in_own_order(unpack_groups(packed, *shape[-2:], groups), order)
    assert torch.equal(got.double(), wide.float().double())


def test_groups_that_follow_each_other_have_no_order() -> None:
    numbers, scale, _, _, _ = drawn_numbers(33, 100, groups=Groups())
    packed, order = pack_mixed_groups(numbers, scale, Groups(), torch.arange(100) // 32)
    assert order is None
    assert torch.equal(packed, pack_groups(numbers, scale, Groups()))


@pytest.mark.parametrize(
    "group_of",
    [
        torch.arange(96) % 2,
        torch.arange(96) // 32 + 1,
        torch.arange(96) // 32 - 1,
        torch.arange(64) // 32,
        torch.arange(96).expand(2, 96) // 32,
    ],
)
def test_groups_of_other_sizes_are_refused(group_of: Tensor) -> None:
    numbers, scale, _, _, _ = drawn_numbers(33, 96, groups=Groups())
    with pytest.raises(ValueError, match="96 inputs are in 3 groups of 32"):
        pack_mixed_groups(numbers, scale, Groups(), group_of)


def test_an_order_is_kept_beside_a_weight_and_torch_undoes_it(config: OmniConfig) -> None:
    m = made(config, "thinker", "tiny", "int4")
    name = "decoder.layers.0.ffn.gate_up"
    form = weight_form(PRECISIONS["int4"], "thinker", m.model, name)
    assert form.matrix is not None and form.groups is not None
    numbers, scale, group_of, _, wide = drawn_numbers(*form.matrix, groups=form.groups)
    blocks, order = pack_mixed_groups(numbers, scale, form.groups, group_of)
    assert order is not None
    kept = {name: blocks, name + ORDER: order}
    put_kept(m.packed, name, form, kept)
    assert m.packed.get_submodule("decoder.layers.0.ffn").gate_up_order is order
    shape = m.model.get_parameter(name).shape
    assert torch.equal(form.widen(kept, name, shape), wide.float().view(shape))


@needs_c
@torch.no_grad()
@EVERY_TYPE
@pytest.mark.parametrize(("out", "into"), [(1, 256), (33, 301), (160, 130)])
def test_products_of_all_kinds_are_torchs_over_the_weights(
    library: Library,
    use_kind: Callable[[str], None],
    groups: Groups | None,
    out: int,
    into: int,
) -> None:
    """With fused multiplications the same bits on all of them."""
    packed, widened = mixed_linear(out, into, groups)
    for rows in (1, 3, 5, 12, 13, 40):
        x, results = torch.randn(rows, into), {}
        for kind in reversed(KINDS):
            use_kind(kind)
            results[kind] = NativeLinear(packed, library, 1)(x)
            expected = widened(x.double()).float()
            torch.testing.assert_close(results[kind], expected, atol=2e-5, rtol=1e-5)
        assert_equal(results["_avx2"], results["_avx512"])


@needs_c
@torch.no_grad()
@EVERY_TYPE
def test_a_row_has_the_same_bits_whatever_the_rows_and_threads(
    library: Library, groups: Groups | None
) -> None:
    packed, _ = mixed_linear(500, 301, groups)
    x = torch.randn(100, 301)
    expected = NativeLinear(packed, library, 1)(x)
    for threads, rows in itertools.product((1, 4), (1, 2, 7, 12, 13, 100)):
        assert_equal(NativeLinear(packed, library, threads)(x[-rows:]), expected[-rows:])


def give_orders(m: Made, which: str, dtype: str) -> int:
    """Give every int8 and int4 matrix, each of a stack, its own order. Returns their count."""
    generator, count = torch.Generator().manual_seed(7), 0
    for name, weight in m.model.named_parameters():
        form = weight_form(PRECISIONS[dtype], which, m.model, name)
        if form.matrix is None or form.kept_as not in (torch.int8, torch.uint8):
            continue
        *stack, _, into = form.matrix
        order = torch.rand(*stack, into, generator=generator).argsort(-1).int()
        weight.data = in_own_order(weight.data.view(form.matrix), order).view(weight.shape)
        owner, _, last = name.rpartition(".")
        m.packed.get_submodule(owner).register_buffer(last + ORDER, order)
        count += 1
    return count


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    ("which", "stack"),
    [("thinker", "odd"), ("thinker", "dense"), ("talker", "wide"), ("talker", "every expert")],
)
def test_a_decoder_with_orders_everywhere_is_torchs(
    config: OmniConfig, library: Library, which: str, stack: str, dtype: str
) -> None:
    """Gate, up and down of each expert by orders of their own; of any rows and threads."""
    m = made(config, which, stack, dtype)
    assert give_orders(m, which, dtype) >= 4 * m.c.layers
    rows, positions = prompt_rows(m.c, 30)
    own = copied(m.cache).slots(1, 2)
    expected = m.model.prefill(rows, positions, torch.tensor([29]), PromptCache(own))
    steps = m.native(library)
    got = steps.prefill(1, 0, rows, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    shared = m.native(library, 4)
    assert_equal(shared.prefill(2, 0, rows, positions), got)
    shared.prefill(0, 0, rows[:5], positions[:, :5])
    assert_equal(shared.prefill(0, 5, rows[5:], positions[:, 5:])[0], got[0])
    inputs = inputs_of(m.c, which, 3)
    together = decode(shared, [0, 1, 2], [30] * 3, [31.0] * 3, inputs)
    alone = decode(steps, [2], [30], [31.0], inputs[2:])
    for ours, theirs in zip(parts(together), parts(alone), strict=True):
        assert_equal(ours[2:], theirs)


@needs_c
def test_what_is_no_order_is_refused(library: Library) -> None:
    packed, _ = mixed_linear(40, 96, Groups())
    order: Tensor = packed.weight_order
    for wrong, said in (
        (order.long(), r"torch\.int32 \[96\]"),
        (order[:-1], r"torch\.int32 \[96\]"),
        (order + 1, "order of 96 inputs has inputs 1 to 96"),
        (order - 1, "order of 96 inputs has inputs -1 to 94"),
    ):
        packed.weight_order = wrong
        with pytest.raises(UnsuitedError, match=said):
            NativeLinear(packed, library, 1)
    plain = nn.Linear(96, 40)
    plain.weight = nn.Parameter(pack(plain.weight.data), requires_grad=False)
    plain.register_buffer("weight" + ORDER, order)
    with pytest.raises(UnsuitedError, match=r"no order of the inputs of torch\.float32"):
        NativeLinear(plain, library, 1)
