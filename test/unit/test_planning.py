"""Compile plans: a target's defaults, what a caller names, and what is refused."""

import shlex
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from qwen3_omni_neuron.cli import compile as verb
from qwen3_omni_neuron.compilation.loading import TARGETS
from qwen3_omni_neuron.compilation.plan import MODELS, models_of
from qwen3_omni_neuron.cpu.slots import CpuSlots
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from testing.released import RELEASED
from testing.specs import plan_of

MODEL = Path("/a/checkpoint")


def test_a_plan_for_neuron_has_these_defaults() -> None:
    plan = plan_of(MODEL, RELEASED, "neuron")
    assert (str(plan.tp), plan.lnc, plan.dtype) == ("8", 2, "bfloat16")
    assert (plan.context_length, plan.talker_context_length) == (8192, 8192 + 9 + 4096)
    assert plan.prompt_buckets[-1] == plan.decode_buckets[-1] == 8192
    assert plan.batches == (1, 8)
    assert plan.predictor_top_k == 50


def test_a_plan_has_chunked_prefill_where_its_targets_engines_do() -> None:
    assert {name: plan_of(MODEL, RELEASED, name).chunked_prefill for name in TARGETS} == {
        "cpu": True,
        "neuron": False,
        "torchneuron": True,
    }
    assert CPU.limits.chunked_prefill == CpuSlots.chunked_prefill
    assert NEURON.limits.chunked_prefill == NxdiSlots.chunked_prefill


def test_auto_keeps_the_checkpoints_weights() -> None:
    for stored, target, dtype, arithmetic in (
        ("bfloat16", "cpu", "mixed", "float32"),
        ("float32", "cpu", "float32", "float32"),
        ("float64", "cpu", "float64", "float64"),
        ("bfloat16", "neuron", "bfloat16", "bfloat16"),
        ("float32", "neuron", "float32", "float32"),
    ):
        plan = plan_of(MODEL, replace(RELEASED, dtype=stored), target)
        assert (plan.dtype, plan.arithmetic) == (dtype, arithmetic)
    for rounded in ("int8", "int4"):
        assert plan_of(MODEL, RELEASED, dtype=rounded).arithmetic == "float32"
    assert plan_of(MODEL, RELEASED, dtype="bfloat16").arithmetic == "bfloat16"


@pytest.mark.parametrize("target", TARGETS)
def test_settings_make_the_same_plan_again(target) -> None:
    sizes = {} if target == "cpu" else {"prompt_buckets": (100, 300)}
    plan = plan_of(MODEL, RELEASED, target, **sizes, max_concurrency=3)
    whole = (8192,) if target == "neuron" else ()  # a prompt that is not computed in chunks
    assert plan.prompt_buckets == (*sizes.get("prompt_buckets", ()), *whole)
    assert plan_of(MODEL, RELEASED, **plan.settings) == plan


@pytest.mark.parametrize("context_length", [64, 300, 512])
def test_chunks_of_a_prefill_fit_a_short_context(context_length) -> None:
    plan = plan_of(MODEL, RELEASED, "torchneuron", context_length=context_length)
    assert plan.prompt_buckets == tuple(sorted({min(128, context_length), context_length}))
    assert plan_of(MODEL, RELEASED, **plan.settings) == plan


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_makes_the_same_plan_again(target) -> None:
    parser = ArgumentParser()
    verb.add_compile(parser)
    sizes = {} if target == "cpu" else {"prompt_buckets": (100,)}
    plan = plan_of(MODEL, RELEASED, target, **sizes, chunk_frames=(1, 3))
    words = shlex.split(plan.command(Path("out")))
    parsed = vars(parser.parse_args(words[2:]))
    given = {name: parsed[name] for name in plan.settings}
    assert plan_of(MODEL, RELEASED, **given) == plan


def test_every_setting_is_one_of_some_model() -> None:
    """Else a tree would be taken for fresh that was compiled with another one."""
    for plan in (plan_of(MODEL, RELEASED, dtype="mixed"), plan_of(MODEL, RELEASED, "neuron")):
        seen = {name for model in MODELS for name in plan.model_settings(model)}
        assert seen == plan.settings.keys()


def test_a_checkpoint_that_cannot_speak_has_no_talker_to_plan(config) -> None:
    mute = replace(config, talker=None, code2wav=None)
    plan = plan_of(MODEL, mute)
    assert models_of(mute) == ("thinker", "vision", "audio")
    assert plan.talker_context_length == 0
    assert plan_of(MODEL, mute, **plan.settings) == plan


def test_settings_that_no_plan_can_have_are_refused_by_name() -> None:
    for settings, said in (
        ({"target": "gpu"}, "target must be cpu, neuron or torchneuron, got 'gpu'"),
        ({"tp": 3}, "tp must be 8, 4, 2 or 1 for target neuron, got 3"),
        ({"tp": "thinker=8,predictor=1"}, "tp must be one number .* target neuron, got thinker=8,"),
        ({"tp": "talker=3", "target": "torchneuron"}, "tp must be 8, .* torchneuron, got 3"),
        ({"tp": "eight"}, "tp must be a number, or some of thinker=N,talker=N,.*, got 'eight'"),
        ({"tp": "thinker=8,thinker=4"}, "tp must be a number, or .* got 'thinker=8,thinker=4'"),
        ({"tp": "vision=8"}, "tp must be a number, or .* got 'vision=8'"),
        ({"tp": "thinker="}, "tp must be a number, or .* got 'thinker='"),
        ({"instance": "trn1.2xlarge"}, "instance must be trn2.48xlarge, .* got 'trn1.2xlarge'"),
        (
            {"instance": "trn2.3xlarge", "target": "cpu"},
            "instance is only for the targets on Neuron",
        ),
        ({"target": "cpu", "tp": 8}, "tp must be 1 for target cpu, got 8"),
        ({"lnc": 4}, "lnc must be 2 or 1 for target neuron, got 4"),
        ({"dtype": "mixed"}, "dtype must be auto, bfloat16, float32 or int8 for target neuron"),
        (
            {"dtype": "float16", "target": "cpu"},
            "dtype must be auto, mixed, float32, int8, int4, bfloat16 or float64 for target cpu",
        ),
        ({"predictor_dtype": "int8"}, "predictor_dtype must be auto, mixed, .* in dtype bf"),
        ({"max_concurrency": 0}, "max_concurrency must be an integer of 1 or more, got 0"),
        ({"context_length": 1}, "context_length must be an integer from 2 to 65536 for this check"),
        ({"talker_context_length": 9}, "talker_context_length must be .* 10 to 65536 .* got 9"),
        ({"batches": (2, 1)}, r"batches must be a list of .*ascending sizes.* got \(2, 1\)"),
        ({"audio_windows": ()}, "audio_windows must be a list of one or more ascending sizes for"),
        ({"chunk_frames": (), "target": "cpu"}, "chunk_frames must be a list of one or more"),
        (
            {"target": "cpu", "batches": (1, 2)},
            "batches must be left out for target cpu, which accepts any size",
        ),
        (
            {"prompt_buckets": (9000,)},
            "prompt_buckets has 9000, more than the KV cache.s 8192 positions",
        ),
        ({"patch_buckets": (30,)}, r"patch_buckets must be .* multiples of 4.* got \(30,\)"),
        ({"predictor_top_k": 0}, "predictor_top_k must be an integer of 1 or more for target neur"),
        ({"target": "cpu", "predictor_top_k": 5}, "predictor_top_k must be 0 for target cpu, got"),
        ({"target": "cpu", "bathces": 5}, "unknown option 'bathces'. Did you mean batches"),
    ):
        with pytest.raises(OptionError, match=said):
            plan_of(MODEL, RELEASED, **({"target": "neuron"} | settings))
