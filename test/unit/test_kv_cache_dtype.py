"""KV caches in bfloat16: what is kept, what is read, who may ask for them."""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import model_arguments
from qwen3_omni_neuron.cpu import build
from qwen3_omni_neuron.cpu.build import build_engines
from qwen3_omni_neuron.cpu.eager import EagerSlots
from qwen3_omni_neuron.cpu.native.binding import Library, UnsuitedError
from qwen3_omni_neuron.cpu.native.steps import NativeSlots
from qwen3_omni_neuron.cpu.slots import CpuSlots
from qwen3_omni_neuron.engines.protocols import DecoderSlots
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.loading import TARGETS, check_kv_cache_dtype
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from testing.native_library import KINDS, needs_c
from testing.native_modules import (
    BLOCK,
    DTYPES,
    LONG,
    POSITIONS,
    Made,
    assert_equal,
    copied,
    decode,
    inputs_of,
    made,
    parts,
    prompt_rows,
)
from testing.specs import engine_spec

HALF = torch.bfloat16
BOTH = pytest.mark.parametrize("which", ["thinker", "talker"])


def halved(config: OmniConfig, which: str, stack: str, dtype: str = "mixed", **sizes: int) -> Made:
    return made(config, which, stack, dtype, cache_dtype=HALF, **sizes)


# ---- in C


@needs_c
@torch.no_grad()
@BOTH
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head"])
def test_keys_and_values_are_rounded_as_torch_rounds_them(
    config: OmniConfig, library: Library, which: str, stack: str
) -> None:
    """Those of the first layer, which depend on no other rows."""
    half, whole = halved(config, which, stack), made(config, which, stack)
    rows, positions = prompt_rows(half.c, 30)
    half.native(library).prefill(1, 0, rows, positions)
    whole.native(library).prefill(1, 0, rows, positions)
    for name in ("keys", "values"):
        got, exact = (getattr(m.cache, name)[0, 1, :, :30] for m in (half, whole))
        assert torch.equal(got, exact.to(HALF))
        assert not torch.equal(got.float(), exact)


@needs_c
@torch.no_grad()
def test_what_is_no_number_stays_none(config: OmniConfig, library: Library) -> None:
    m = halved(config, "thinker", "tiny")
    rows, positions = prompt_rows(m.c, 3)
    rows[1] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)  # NaN, every bit set
    m.native(library).prefill(1, 0, rows, positions)
    kept = m.cache.values[0, 1, :, :3]
    assert kept[:, 1].isnan().all()
    assert kept[:, [0, 2]].isfinite().all()


@needs_c
@torch.no_grad()
@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", ["tiny", "odd", "wide"])
def test_prompts_and_steps_are_the_modules_over_such_a_cache(
    config: OmniConfig,
    library: Library,
    use_kind: Callable[[str], None],
    kind: str,
    which: str,
    stack: str,
) -> None:
    """Within what a key or value on the border of two numbers changes."""
    use_kind(kind)
    m = halved(config, which, stack)
    rows, positions = prompt_rows(m.c, 21)
    expected_cache = copied(m.cache)
    steps = m.native(library)
    got = steps.prefill(1, 0, rows, positions)
    own = PromptCache(expected_cache.slots(1, 2))
    expected = m.model.prefill(rows, positions, torch.tensor([20]), own)
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)
    inputs, slots, lengths = inputs_of(m.c, which, 3), [3, 0, 1], [5, 30, 21]
    slot_cache = SlotCache(expected_cache, torch.tensor(slots), torch.tensor(lengths))
    at = [1.0, 2.0, 3.0]
    torch.testing.assert_close(
        parts(decode(steps, slots, lengths, at, inputs)),
        parts(m.model.decode(inputs, torch.tensor(at), slot_cache)),
        atol=5e-3,
        rtol=5e-3,
    )
    torch.testing.assert_close(m.cache.keys, expected_cache.keys, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(m.cache.values, expected_cache.values, atol=2e-2, rtol=2e-2)


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
def test_a_prompt_in_pieces_is_the_whole_bit_for_bit(
    config: OmniConfig, library: Library, which: str, dtype: str
) -> None:
    """And so are its rows appended one by one, for any number of threads."""
    m = halved(config, which, "odd", dtype, slots=2, positions=LONG)
    rows, positions = prompt_rows(m.c, LONG)
    expected = m.native(library).prefill(0, 0, rows, positions)
    steps = m.native(library, 4)
    for cuts in ([1, 13, 14, 30], [BLOCK - 1], [3, BLOCK + 2]):
        m.cache.keys[:, 1], m.cache.values[:, 1] = float("nan"), float("nan")
        for start, stop in itertools.pairwise((0, *cuts, LONG)):
            last = steps.prefill(1, start, rows[start:stop], positions[:, start:stop])
        assert_equal(last[0], expected[0])
        assert_equal(m.cache.keys[:, 1], m.cache.keys[:, 0])
        assert_equal(m.cache.values[:, 1], m.cache.values[:, 0])


@needs_c
@torch.no_grad()
def test_rows_copied_to_another_slot_go_on_there(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "tiny")
    slots = NativeSlots(m.c, m.packed, 3, POSITIONS, library, dtype=HALF)
    rows, positions = prompt_rows(m.c, 20)
    expected = slots.prefill(0, rows, positions)
    slots.copy(0, 2, 12)
    assert_equal(slots.prefill(2, rows[12:], positions[:, 12:], start=12), expected)


@needs_c
@torch.no_grad()
def test_a_step_over_rows_in_c_is_that_of_torch(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "tiny")
    both: list[DecoderSlots] = [
        NativeSlots(m.c, m.packed, 3, POSITIONS, library),
        EagerSlots(m.c, m.model, 3, POSITIONS, torch.float32),
    ]
    (rows, positions), (more, _) = prompt_rows(m.c, 9), prompt_rows(m.c, 2, seed=6)
    for slots in both:
        slots.prefill(2, rows, positions)
        slots.prefill(0, rows[:4], positions[:, :4])
    ours, expected = (slots.step([2, 0], more) for slots in both)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@needs_c
def test_a_cache_of_another_type_is_refused(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "tiny")
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(UnsuitedError, match=f"no keys and values in {dtype}"):
            m.native(library, cache=KvCache(m.cache.keys.to(dtype), m.cache.values.to(dtype)))
    with pytest.raises(UnsuitedError, match="bfloat16"):
        m.native(library, cache=KvCache(m.cache.keys, m.cache.values.to(HALF)))


# ---- in torch


@torch.no_grad()
@BOTH
def test_torch_attends_to_what_the_cache_keeps(config: OmniConfig, which: str) -> None:
    """A prompt at once and row by row, in float64: only rounding to bfloat16 is left."""
    m = halved(config, which, "odd")
    model = m.model.double()
    rows, positions = prompt_rows(m.c, 20)
    rows = rows.double()
    last = torch.tensor([19])
    whole = model.prefill(rows, positions, last, PromptCache(m.cache.slots(0, 1)))
    for start in range(20):
        window = m.cache.slots(1, 2).window(start + 1)
        own = rows[start : start + 1], positions[:, start : start + 1], torch.tensor([0])
        one = model.prefill(*own, PromptCache(window, start))
    torch.testing.assert_close(one[0], whole[0], atol=1e-9, rtol=1e-9)
    assert torch.equal(m.cache.keys[:, 1, :, :20], m.cache.keys[:, 0, :, :20])
    exact = KvCache.zeros(m.c, 1, POSITIONS, torch.float64)
    other = model.prefill(rows, positions, last, PromptCache(exact))
    assert not torch.allclose(other[0], whole[0], atol=1e-6)


# ---- who may ask for them


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize(
    ("asked", "dtype", "expected"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "mixed", torch.float32),
        ("float32", "int8", torch.float32),
        ("bfloat16", "mixed", HALF),
        ("bfloat16", "int4", HALF),
        ("auto", "bfloat16", HALF),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float64", HALF),
    ],
)
def test_thinker_and_talker_keep_the_dtype_that_was_asked_for(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_c: bool,
    asked: str,
    dtype: str,
    expected: torch.dtype,
) -> None:
    if not in_c:
        monkeypatch.setattr(build, "library_for", lambda dtype: None)
    spec = replace(engine_spec(checkpoint, dtype=dtype), kv_cache_dtype=asked)
    built: Any = build_engines(spec, ("thinker", "talker"))
    thinker, talker = built["thinker"], built["talker"]
    assert isinstance(thinker, ThinkerEngine) and isinstance(talker, TalkerEngine)
    for slots in (thinker._decoder, talker._decoder):
        cache = slots._cache
        assert cache.keys.dtype == cache.values.dtype == expected


def test_a_reply_over_them_is_the_same_from_the_prefix_cache_and_in_processes(
    checkpoint: Path,
) -> None:
    messages: Any = [{"role": "user", "content": "What is it? " * 20}]
    options: Any = {"seed": 3, "thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
    replies = []
    for more in ({}, {"reuse": False}, {"placement": "split"}, {"kv_cache_dtype": "float32"}):
        load: Any = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "threads": 2} | more
        with Qwen3Omni.load(checkpoint, max_concurrency=2, **load) as omni:
            for _ in range(2):  # the second finds the first one's rows
                replies.append(omni.generate_audio(messages, **options))
    first, *others = replies[:6]
    for other in others:
        assert other.token_ids == first.token_ids
        assert other.codes.tolist() == first.codes.tolist()
    assert replies[1].timings.reused_tokens > 0


@pytest.mark.parametrize("asked", ["float16", "int8", "", "Bfloat16"])
def test_another_dtype_is_refused(checkpoint: Path, asked: str) -> None:
    with pytest.raises(OptionError, match=f"auto, float32, bfloat16 for target cpu, got '{asked}'"):
        Qwen3Omni.load(checkpoint, kv_cache_dtype=asked)


@pytest.mark.parametrize("target", ["neuron", "torchneuron"])
def test_targets_on_neuron_have_the_dtype_they_were_compiled_with(target: str) -> None:
    check_kv_cache_dtype(TARGETS[target], "auto")
    with pytest.raises(OptionError, match=f"is auto for target {target}, .*bfloat16"):
        check_kv_cache_dtype(TARGETS[target], "bfloat16")


def test_a_cache_that_the_system_does_not_give_is_refused_with_what_to_lower(
    config: OmniConfig,
) -> None:
    with pytest.raises(OptionError, match=r"3 slots of \d{14} positions.*Lower max_concurrency"):
        CpuSlots(config.thinker.text, 3, 2**44, torch.float32)


def test_the_command_line_passes_kv_cache_dtype_to_the_load() -> None:
    parser = argparse.ArgumentParser()
    model_arguments.add_model_arguments(parser)
    for words, expected in (([], "auto"), (["--kv-cache-dtype", "bfloat16"], "bfloat16")):
        parsed = parser.parse_args(["--model", "x", *words])
        assert model_arguments.load_arguments(parsed, 1)["kv_cache_dtype"] == expected
