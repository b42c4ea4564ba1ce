"""Whole replies over NxDI's CPU mode, against the CPU engines' and the reference's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.errors import EngineError
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import CASES
from testing.neuron.cpu_mode import build_cpu_mode_engines
from testing.neuron.nxdi_engines import nxdi_spec
from testing.replies import assert_alike, assert_same, reply_to_the_limit
from testing.tiny import write_tiny_checkpoint
from testing.tiny.sizes import SIZES, resized

TEXT = [{"role": "user", "content": "What colour is the sky?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its accept layer lies above those that deepstack adds to, as in the release. Where it does
    not, 4.57 hands out hidden states that deepstack was added to."""
    thinker = {"text_config": {"num_hidden_layers": 5}}
    talker = {"accept_hidden_layer": 4}
    size = resized(SIZES["tiny"], {"thinker_config": thinker, "talker_config": talker})
    return write_tiny_checkpoint(tmp_path_factory.mktemp("deeper"), seed=1, size=size)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=2) as omni:
        yield omni


@pytest.fixture(scope="module")
def omni_over_nxdi(nxdi: None, checkpoint: Path) -> Iterator[Qwen3Omni]:
    config = read_config(checkpoint)
    prompt_builder = PromptBuilder(checkpoint, config)
    engines = build_cpu_mode_engines(nxdi_spec(checkpoint, max_concurrency=2))
    defaults = read_generation_defaults(checkpoint)
    with Qwen3Omni(config, defaults, prompt_builder, engines, max_queued=8) as omni:
        yield omni


@pytest.mark.parametrize(
    "name", ["image-and-audio", "video-of-odd-rate", "video-heard", "two-clips", "five-turns"]
)
def test_a_reply_is_the_references(
    omni_over_nxdi: Qwen3Omni, reference: Reference, name: str
) -> None:
    case = CASES[name]
    ours, theirs = reply_to_the_limit(
        omni_over_nxdi,
        reference,
        case.messages,
        tokens=6,
        talker_max_new_tokens=12,
        video_second_per_grid=case.seconds_per_grid,
        use_audio_in_video=case.use_audio_in_video,
    )
    assert_same(ours, theirs, reference)
    assert len(ours.codes) == 11


def test_replies_side_by_side_are_the_cpu_engines(
    omni_over_nxdi: Qwen3Omni, omni: Qwen3Omni
) -> None:
    """Sampled, three at once on two slots: steps of one slot, of two, and with one idle."""
    limits = {"thinker_max_new_tokens": 8, "talker_max_new_tokens": 16}
    asked = [TEXT, CASES["audio-and-image"].messages, TEXT]
    alone = [omni.generate_audio(m, seed=s, **limits) for s, m in enumerate(asked)]
    streams = [omni_over_nxdi.stream(m, seed=s, **limits) for s, m in enumerate(asked)]
    for expected, stream in zip(alone, streams, strict=True):
        *_, finished = stream
        assert_alike(finished.result, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "where"), [("thinker", "text token 2"), ("talker", "code 0 of frame 1")]
)
def test_nan_in_a_slot_ends_its_request_alone(
    omni_over_nxdi: Qwen3Omni, monkeypatch: pytest.MonkeyPatch, part: str, where: str
) -> None:
    limits: Any = {"thinker_max_new_tokens": 8, "talker_max_new_tokens": 16, "seed": 0}
    alone = omni_over_nxdi.generate_audio(TEXT, **limits)
    engine: Any = getattr(omni_over_nxdi._pipeline._engines, part)
    beside, step = omni_over_nxdi.stream(TEXT, **limits), engine.step
    victim, cells = 1 - beside.slot, engine._kv_slots

    @torch.inference_mode()
    def planted(slots: list[int], rows: Any) -> Any:
        if victim in slots:
            for tensor in cells._graphs.context_encoding_model.model.kv_mgr.past_key_values:
                tensor.data[victim, :, : cells._lengths[victim]] = torch.nan
        return step(slots, rows)

    monkeypatch.setattr(engine, "step", planted)
    with pytest.raises(EngineError, match=f"The {part} .* {where}"):
        omni_over_nxdi.generate_audio("a" * 100, **limits)
    monkeypatch.undo()
    after = [omni_over_nxdi.stream(TEXT, **limits) for _ in range(2)]
    for stream in (beside, *after):
        *_, finished = stream
        assert finished.result.codes.tolist() == alone.codes.tolist()
