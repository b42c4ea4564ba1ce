"""The dtypes of the CPU: how weights are packed, rounded and kept, and who computes with them."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, lay_out
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.compilation.loading import stage_threads
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.packing import (
    PANEL,
    Groups,
    pack,
    pack_groups,
    packed_shape,
    quantise_groups,
    unpack,
    unpack_groups,
)
from qwen3_omni_neuron.cpu.precision import PRECISIONS, weight_form
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models
from qwen3_omni_neuron.engines.talker import TextRows
from testing.replies import assert_alike
from testing.subprocesses import run_python

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 100), st.integers(1, 70))


def random_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_unpacking_is_the_reverse_of_packing(shape, dtype) -> None:
    """In C and in torch the same, with zeros after the last output."""
    matrix, (stack, out, into) = random_matrix(shape, dtype), shape
    packed = pack(matrix)
    assert packed.shape == packed_shape(shape) == (stack, -(-out // PANEL), into, PANEL)
    assert torch.equal(unpack(packed, out), matrix)
    assert not packed.transpose(-1, -2).flatten(1, 2)[:, out:].any()
    if (library := find_library()) is not None:
        from qwen3_omni_neuron.cpu.native.binding import pack_in_c

        assert torch.equal(pack_in_c(matrix, library), packed)
        if dtype == torch.bfloat16:
            widened = pack(matrix.float())
            assert torch.equal(pack_in_c(matrix, library, torch.float32), widened)
            assert torch.equal(pack(matrix, torch.float32), widened)
        assert torch.equal(
            pack_in_c(matrix.transpose(0, 1).contiguous().transpose(0, 1), library), packed
        )


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, size=st.floats(1e-6, 1e6))
def test_int8_is_within_half_a_step(shape, size) -> None:
    """The largest weight of a row is 127 steps."""
    matrix = random_matrix(shape, torch.float32) * size
    matrix[:, 0] = 0
    whole, scale = quantise(matrix)
    assert whole.dtype == torch.int8 and scale.shape == shape[:-1]
    assert not whole[:, 0].any() and not scale[:, 0].any()
    assert (whole[:, 1:].abs().amax(-1) == 127).all()
    error = (whole.double() * scale.double().unsqueeze(-1) - matrix.double()).abs()
    assert (error <= scale.double().unsqueeze(-1) * (0.5 + 1e-5)).all()
    assert torch.equal(
        quantise(matrix.to(torch.bfloat16).float())[0], quantise(matrix.bfloat16())[0]
    )


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, size=st.floats(1e-6, 1e6), group=st.sampled_from([32, 64, 128]))
def test_int4_has_the_nearest_numbers_of_a_signed_scale(shape, size, group) -> None:
    matrix, groups = (random_matrix(shape, torch.float32) * size).bfloat16(), Groups(group)
    matrix[:, 0] = 0
    numbers, scale = quantise_groups(matrix, groups)
    assert numbers.shape == shape and scale.shape == (*shape[:-1], -(-shape[-1] // group))
    assert not numbers[:, 0].any() and not scale[:, 0].any()
    wide = scale.double().repeat_interleave(group, -1)[..., : shape[-1]]
    nearest = (matrix.double() / wide).nan_to_num(0).clamp(-8, 7)
    assert ((numbers - nearest).abs() <= 0.5 + 1e-6).all()
    packed = pack_groups(numbers, scale, groups)
    expected = (numbers * wide).float()
    assert torch.equal(unpack_groups(packed, *shape[-2:], groups), expected)


@pytest.mark.parametrize("dtype", ["mixed", "float32", "int8", "int4"])
def test_weights_widened_at_load_are_those_that_were_packed(checkpoint, config, dtype) -> None:
    """Values are the same without the library, in float32 and in the modules' own shapes."""
    packed, wide = (
        load_checkpoint_models(Checkpoint(checkpoint), config, dtype, STAGES, packed=packed)
        for packed in (True, False)
    )
    _, parts = lay_out(config)
    for part, laid_out in parts.items():
        ours = getattr(packed, part)
        kept = dict(ours.named_parameters()) | dict(ours.named_buffers())
        for name, parameter in getattr(wide, part).named_parameters():
            form = weight_form(PRECISIONS[dtype], part, laid_out.module, name)
            assert torch.equal(parameter, form.widen(kept, name)), f"{part}.{name}"
            assert parameter.dtype == torch.float32


def test_text_rows_are_projected_once_when_they_are_asked_for() -> None:
    asked: list[list[int]] = []
    table = torch.randn(50, 8).bfloat16()
    projection = torch.randn(8, 6)

    def project(rows: Tensor) -> Tensor:
        assert rows.dtype == torch.float32
        asked.append([int((table.float() == row).all(-1).nonzero()[0, 0]) for row in rows])
        return rows @ projection

    rows = TextRows(table, project, 6, torch.float32)
    for ids in ([7, 3, 7], [3], [3, 9], [7, 9, 3]):
        expected = table[ids].float() @ projection
        torch.testing.assert_close(rows(torch.tensor(ids)), expected)
    found = rows.with_rows((11, 3, 11))[[11, 3]]
    torch.testing.assert_close(found, table[[11, 3]].float() @ projection)
    assert asked == [[3, 7], [9], [11]]
    fresh = TextRows(table, project, 6, torch.float32)
    for one in range(50):
        torch.testing.assert_close(fresh(torch.tensor([one])), table[[one]].float() @ projection)
    got = rows(torch.tensor([7]))
    got.zero_()
    assert rows(torch.tensor([7])).any(), "a result is a copy"
    assert rows.fill() is rows
    asked.clear()
    torch.testing.assert_close(rows(torch.arange(50)), table.float() @ projection)
    assert not asked


def test_shares_of_the_threads() -> None:
    """One pool for a process: thinker and talker may have all of it. Processes share the cores."""
    for placement, total, *shares in (
        ("shared", 1, 1, 1, 1), ("shared", 2, 2, 2, 1), ("shared", 5, 5, 5, 3),
        ("shared", 32, 32, 32, 16), ("shared", 8, 8), ("split", 1, 1, 1, 1), ("split", 5, 2, 2, 1),
        ("split", 32, 12, 12, 6), ("split", 8, 8),
    ):  # fmt: skip
        stages = STAGES[: len(shares)]
        found = stage_threads(total, stages, placement)
        assert found == dict(zip(stages, shares, strict=True))
        assert placement == "shared" or sum(found.values()) <= max(total, len(stages))


@pytest.mark.parametrize("placement", ["shared", "split"])
@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.diagonal
def test_a_reply_does_not_depend_on_threads(checkpoint, dtype, placement) -> None:
    messages: Any = [{"role": "user", "content": "What is it? " * 20}]
    options: Any = {
        "seed": 3, "thinker_max_new_tokens": 6, "talker_max_new_tokens": 8, "chunk_frames": [4],
    }  # fmt: skip
    replies = []
    for threads in (1, 4):
        where = placement if threads > 1 else "shared"
        with Qwen3Omni.load(checkpoint, dtype=dtype, threads=threads, placement=where) as omni:
            replies.append(omni.generate_audio(messages, **options))
    assert_alike(*replies, atol=0)


OTHER_DEFAULTS = """
import torch
from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.cpu.native.binding import empty_floats

def answer():
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1, context_length=512) as omni:
        return omni.generate_audio([{"role": "user", "content": "Please say seven"}], seed=1)

expected = answer()
torch.set_default_dtype(torch.bfloat16)
found = answer()
assert found.text == expected.text == "seven"
assert found.codes.tolist() == expected.codes.tolist()
assert abs(found.audio - expected.audio).max() == 0
with torch.device("meta"):
    made = empty_floats(2, 3)
assert (made.dtype, made.device.type) == (torch.float32, "cpu")
"""


def test_what_the_c_fills_is_as_it_needs_it_whatever_torch_has_as_its_defaults() -> None:
    run_python("-c", OTHER_DEFAULTS)


FORKED = """
import os, torch
from qwen3_omni_neuron.model.kv_cache import lazy_zeros
rows = lazy_zeros((4,), torch.float32)
if os.fork() == 0:
    rows[:] = 42
    os._exit(0)
os.wait()
assert not rows.any()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_was_forked_has_a_cache_of_its_own() -> None:
    run_python("-c", FORKED)
