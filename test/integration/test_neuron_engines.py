"""The Neuron engines over simulated graphs reply as the CPU's engines do."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.checkpoint.config_json import read_generation_defaults
from qwen3_omni_neuron.compilation.loading import load_engines
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.nxdi.build import build_engines
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.eager_neuron import (
    CONTEXT_LENGTH,
    DECODE_BUCKETS,
    PROMPT_BUCKETS,
    REPORT,
    SLOTS,
    EagerToolchain,
    eager_spec,
    eager_target,
)
from testing.media_cases import CASES, audio, text, user
from testing.neuron.alike import GREEDY as GREEDY_FRAME
from testing.neuron.alike import SPEAKER, assert_close
from testing.prompts import prompt_of
from testing.replies import GREEDY, assert_alike
from testing.specs import cpu_engines

TEXT = [{"role": "user", "content": "What colour is the sky?"}]
LONG_AUDIO = [user(audio(15.0), audio(0.4), text("Which is longer?"))]  # 3 windows
LIMITS = {"thinker_max_new_tokens": 8, "talker_max_new_tokens": 15}
REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    (TEXT, {"seed": 1, "predictor_top_p": 0.3}),
    (CASES["image-and-audio"].messages, {"seed": 3, "predictor_top_k": 10}),
    (TEXT, GREEDY),
    (CASES["two-clips"].messages, {"seed": 4, "predictor_do_sample": False}),
    (LONG_AUDIO, {"seed": 5, "chunk_frames": [2, 8]}),
    (CASES["video"].messages, {"seed": 6, "predictor_top_k": 1, "thinker_do_sample": True}),
]


# How frames of three slots are chosen in one call: from 50 codes, greedily, and from 7 codes.
HOW = [PredictorSampling(5, 50, 0.8), GREEDY_FRAME, PredictorSampling(6, 7, 1.0)]


@pytest.fixture(scope="module")
def spec(checkpoint) -> EngineSpec:
    return eager_spec(checkpoint)


def omni_over(engines: Engines, spec: EngineSpec, prompt_builder: PromptBuilder) -> Qwen3Omni:
    defaults = read_generation_defaults(spec.plan.model)
    return Qwen3Omni(spec.config, defaults, prompt_builder, engines, 8, predictor_top_k=50)


@pytest.fixture(scope="module")
def toolchain(spec) -> EagerToolchain:
    return EagerToolchain(spec)


@pytest.fixture(scope="module")
def neuron(spec, prompt_builder, toolchain) -> Iterator[Qwen3Omni]:
    engines = Engines.of(build_engines(spec, toolchain=toolchain))
    with omni_over(engines, spec, prompt_builder) as omni:
        yield omni


@pytest.fixture(scope="module")
def cpu(spec, prompt_builder) -> Iterator[Qwen3Omni]:
    with omni_over(cpu_engines(spec), spec, prompt_builder) as omni:
        yield omni


@pytest.fixture(scope="module")
def expected(cpu) -> list[SpeechResult]:
    return [cpu.generate_audio(m, **LIMITS, **options) for m, options in REQUESTS]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_a_reply_is_the_cpus(neuron, expected, number) -> None:
    messages, options = REQUESTS[number]
    result = neuron.generate_audio(messages, **LIMITS, **options)
    assert_alike(result, expected[number])
    assert len(result.codes) == 14


def test_replies_at_once_are_those_alone(neuron, expected) -> None:
    """Twice as many as slots: batches of one, of two beside padding, and of three; slots that
    others have used."""
    streams = [neuron.stream(messages, **LIMITS, **options) for messages, options in REQUESTS]
    for stream, theirs in zip(streams, expected, strict=True):
        *_, finished = stream
        assert_alike(finished.result, theirs)


@pytest.fixture(scope="module")
def both(cpu, neuron) -> tuple[Engines, Engines]:
    return cpu._pipeline._engines, neuron._pipeline._engines


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 0], [1]])
def test_the_talkers_steps_of_slots_in_any_order_are_the_cpus(both, toolchain, order) -> None:
    spoken = []
    for engines in both:
        talker: Any = engines.talker
        logits: dict[int, torch.Tensor] = {}
        for slot, rows in enumerate((45, 3, 70)):
            prompt = prompt_of(torch.arange(rows) % 150 + 7 * slot + 1)
            talker.prepare(slot, prompt.talker, SPEAKER)
            logits[slot] = talker.prefill(slot, torch.zeros(0, 64), 9 + slot)
        frames = []
        for turn in (order, order, [1, 0, 2]):  # those that were idle go on
            code0 = [int(logits[slot].argmax()) for slot in turn]
            frames.append(talker.predict(turn, code0, [HOW[slot] for slot in turn]).tolist())
            stepped = talker.step(turn, [11 + slot for slot in turn])
            logits |= dict(zip(turn, stepped.split(1), strict=True))
        spoken.append((frames, torch.cat([logits[slot] for slot in range(3)])))
    assert spoken[1][0] == spoken[0][0]
    assert_close(spoken[1][1], spoken[0][1])
    assert toolchain.decoders["talker"].called[-1][0] == f"decode {SLOTS}"


def test_every_graph_is_called_once_before_the_first_request(spec, caplog) -> None:
    simulated = EagerToolchain(spec)
    with caplog.at_level(logging.INFO, "qwen3_omni_neuron"):
        engines = Engines.of(build_engines(spec, toolchain=simulated))
    for name, part in simulated.parts.items():
        warmed = part.called[: len(part.graphs)]
        assert sorted(warmed) == sorted(part.graphs), name
        assert f"{name}: called each of {len(part.graphs)} graphs once, in " in caplog.text
        if name != "text_projection":  # whose table is made of it right after
            assert part.called == warmed
    for name, held in (("thinker", CONTEXT_LENGTH), ("talker", 4096)):
        wanted = {("prefill", b) for b in (*PROMPT_BUCKETS, CONTEXT_LENGTH)}
        looked_back = sorted({*DECODE_BUCKETS, CONTEXT_LENGTH, held})
        wanted |= {(f"decode {n}", b) for n in (1, SLOTS) for b in looked_back}
        assert len(simulated.decoders[name].called) == len(wanted)
        assert set(simulated.decoders[name].called) == wanted
        assert f"{name}: called each of {len(wanted)} graphs once" in caplog.text
    state = simulated.parts["code2wav"].state
    assert not any(tensor.any() for tensor in state), "no state changed"
    close(engines)


def load(
    spec: EngineSpec, placement: str, instance: str = "trn2.48xlarge", **cores: Any
) -> Engines:
    target = eager_target(EagerToolchain(spec))
    return load_engines(target, spec, LoadOptions(placement=placement, instance=instance, **cores))


def close(engines: Engines) -> None:
    for engine in (engines.thinker, engines.talker, engines.vocoder):
        engine.close()


def test_a_graph_that_fails_at_its_first_call_fails_the_load(spec) -> None:
    for part, label in (
        ("audio_encoder", "audio_encoder[windows=4]"),
        ("code_predictor", "code_predictor[slots=3,top_k=50]"),
        ("code2wav", "code2wav[streams=3,frames=8]"),
    ):
        toolchain = EagerToolchain(spec, broken={part: label})
        with pytest.raises(RuntimeError, match="failed on the device"):
            build_engines(spec, toolchain=toolchain)
        assert all(p.closed for p in toolchain.parts.values()), "what was loaded is given back"


def test_a_failure_in_a_part_reaches_the_caller_and_ends_nothing_else(
    neuron, toolchain, expected
) -> None:
    for part, label in (
        ("audio_encoder", "audio_encoder[windows=4]"),
        ("hidden_projection", "hidden_projection[rows=32]"),
        ("code_predictor", "code_predictor[slots=3,top_k=50]"),
        ("code2wav", "code2wav[streams=1,frames=1]"),
    ):
        broken = toolchain.parts[part]
        broken.broken = label
        try:
            with pytest.raises(RuntimeError, match="failed on the device"):
                neuron.generate_audio(LONG_AUDIO, **LIMITS, **GREEDY, chunk_frames=[1])
        finally:
            broken.broken = ""
        assert_alike(neuron.generate_audio(TEXT, **LIMITS, **GREEDY), expected[2])


def test_more_codes_than_were_compiled_are_refused_at_submission(neuron) -> None:
    for top_k, said in ((51, r"is 51 \(51 codes\)"), (0, r"is 0 \(\d+ codes\)")):
        with pytest.raises(OptionError, match=rf"predictor_top_k {said}.* at most 50. Set 1 to 50"):
            neuron.stream(TEXT, **LIMITS, predictor_top_k=top_k, seed=0)
        neuron.generate_text(TEXT, **LIMITS, predictor_top_k=top_k)


def test_each_stage_in_a_process_with_cores_of_its_own(
    spec, prompt_builder, expected, tmp_path, monkeypatch
) -> None:
    """Through real processes, each of which says what it was given."""
    monkeypatch.setenv(REPORT, str(tmp_path))
    with omni_over(load(spec, "split"), spec, prompt_builder) as omni:
        result = omni.generate_audio(REQUESTS[1][0], **LIMITS, **REQUESTS[1][1])
    assert_alike(result, expected[1])
    said = sorted(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert said == ["0-7 2", "16-23 2", "8-15 2"]
    assert str(os.getpid()) not in {path.name for path in tmp_path.iterdir()}
