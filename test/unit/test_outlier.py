"""The made checkpoint with the published activations of the real code predictor."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.checkpoint.parameters import load_parts
from qwen3_omni_neuron.checkpoint.tiny import write_tiny_checkpoint
from qwen3_omni_neuron.checkpoint.tiny.outlier import LAYERS, OUTLIER, with_outlier_layers
from qwen3_omni_neuron.checkpoint.tiny.sizes import SIZES, config_dict
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.code_predictor import CodePredictor, top_p_limits
from testing.teacher_forcing import teacher_forced_logits

FRAMES = 296  # as published
FLOAT16_MAX = torch.finfo(torch.float16).max
Codes = tuple[torch.Tensor, torch.Tensor]


def talker_models(folder: Path, dtype: torch.dtype = torch.float32) -> Models:
    """Load the talker's modules. The gains of the talker's norm stand for its hidden states."""
    models, parts = lay_out(read_config(folder), ("talker",))
    load_parts(list(parts.values()), Checkpoint(folder), dtype)
    return models


def inputs(models: Models) -> tuple[torch.Tensor, ...]:
    """Return hidden states of a bfloat16 talker, code 0, random numbers and top_p of frames."""
    assert models.talker is not None
    draw = torch.Generator().manual_seed(0)
    gains = models.talker.decoder.norm.weight.detach().float()
    hidden = (torch.randn(FRAMES, len(gains), generator=draw) * gains).bfloat16()
    code0 = torch.randint(64, (FRAMES,), generator=draw)
    uniforms = torch.rand(FRAMES, 15, generator=draw)
    return hidden.float(), code0, uniforms, top_p_limits([0.8] * FRAMES)


@torch.inference_mode()
def codes_of(predictor: CodePredictor, given: tuple[torch.Tensor, ...], kind: torch.dtype) -> Codes:
    """Return greedy and sampled codes, computed in a type."""
    hidden, code0, *random = given
    return predictor(hidden.to(kind), code0)[0], predictor(hidden.to(kind), code0, *random)[0]


def shares(ours: Codes, theirs: Codes) -> list[float]:
    """Return the shares of greedy and of sampled frames with the same 16 codes."""
    pairs = zip(ours, theirs, strict=True)
    return [float((a == b).all(1).float().mean()) for a, b in pairs]


@pytest.fixture(scope="module", params=["tiny", "small"])
def outlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_checkpoint(folder, size=request.param, outlier=True)


@torch.inference_mode()
def test_activations_are_as_published(outlier: Path) -> None:
    models = talker_models(outlier)
    predictor = models.code_predictor
    assert predictor is not None
    layers: dict[int, list[torch.Tensor]] = {i: [] for i in range(LAYERS)}
    inner: dict[int, list[torch.Tensor]] = {i: [] for i in range(LAYERS)}
    for i, layer in enumerate(predictor.decoder.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: layers[i].append(out))
        layer.ffn.down.register_forward_pre_hook(lambda _, given, i=i: inner[i].append(given[0]))
    given = inputs(models)
    codes = predictor(*given[:2])[0]
    assert -100 < given[0].min() < -25 and 25 < given[0].max() < 100, "of the talker"
    for i in range(LAYERS):
        rows, most = torch.cat(layers[i]), torch.cat(inner[i]).abs().amax(1)
        others = float(rows[:, 1:].square().mean().sqrt())
        assert 20 < others < 120, i
        if i == 2:
            assert (rows[:, 0] / OUTLIER - 1).abs().max() < 0.02
            assert 400 < OUTLIER / others < 800
            assert most.min() > FLOAT16_MAX, "act(gate) * up overflows"
        else:
            assert rows[:, 0].abs().max() < (0.5 * OUTLIER if i == 3 else 600), i
            assert most.max() < 1000, i
    assert len(codes.unique()) == 64 if len(predictor.head[0]) == 64 else len(codes.unique()) > 1000
    top = teacher_forced_logits(predictor, given[0], codes).topk(2).values
    least = (top[..., 0] - top[..., 1]).amin(1)
    assert 0.03 < least.median() < 0.15, "margin"


def test_the_default_keeps_the_codes_of_float32_and_the_released_form_does_not(
    outlier: Path,
) -> None:
    """bfloat16 weights computed in float32, as on Neuron and in dtypes mixed and bfloat16."""
    models = talker_models(outlier)
    wide, stored = models.code_predictor, talker_models(outlier, torch.bfloat16).code_predictor
    assert wide is not None and stored is not None
    given = inputs(models)
    reference = codes_of(wide, given, torch.float32)
    assert min(shares(codes_of(stored, given, torch.float32), reference)) >= 0.98
    assert max(shares(codes_of(stored, given, torch.bfloat16), reference)) < 0.5


def test_it_is_the_same_for_the_same_seed_and_only_the_talkers_stage_differs(
    tmp_path: Path, checkpoint: Path
) -> None:
    ours, again = (
        write_tiny_checkpoint(tmp_path / name, outlier=True) for name in ("ours", "again")
    )
    for file in ours.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    names = set(Checkpoint(checkpoint).names)
    with Checkpoint(ours).reader() as one, Checkpoint(checkpoint).reader() as other:
        for name in names:
            same = torch.equal(one.tensor(name), other.tensor(name))
            assert same or name.startswith("talker."), name
    assert read_config(ours) != read_config(checkpoint)


def test_an_outlier_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="outlier changes weights, and drawn writes none"):
        write_tiny_checkpoint(tmp_path, drawn=True, outlier=True)


def test_every_size_has_room_for_it() -> None:
    for name, size in SIZES.items():
        config = config_dict(with_outlier_layers(size), dict.fromkeys(map(str, range(9)), 0), "x") if False else None
        assert config is None, name
