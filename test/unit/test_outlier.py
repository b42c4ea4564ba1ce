"""The made checkpoint with the published activations of the real code predictor."""

from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from testing.outlier import codes_in, frame_inputs, same_frames, talker_models
from testing.repeats import again
from testing.teacher_forcing import teacher_forced_logits
from testing.tiny import write_tiny_checkpoint
from testing.tiny.outlier import LAYER, LAYERS, OUTLIER

FLOAT16_MAX = torch.finfo(torch.float16).max


@pytest.fixture(scope="module", params=["tiny", again("small")])
def outlier(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_checkpoint(folder, size=request.param, outlier=True)


@torch.inference_mode()
def test_activations_are_as_published(outlier) -> None:
    models = talker_models(outlier)
    predictor = models.code_predictor
    outs: dict[int, list[torch.Tensor]] = {i: [] for i in range(LAYERS)}
    inner: dict[int, list[torch.Tensor]] = {i: [] for i in range(LAYERS)}
    for i, layer in enumerate(predictor.decoder.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: outs[i].append(out))
        down = layer.get_submodule("ffn.down")
        down.register_forward_pre_hook(lambda _, given, i=i: inner[i].append(given[0]))
    hidden, code0, *_ = frame_inputs(models)
    codes = predictor(hidden, code0)[0]
    assert -100 < hidden.min() < -25 and 25 < hidden.max() < 100, "of the talker"
    for i in range(LAYERS):
        rows, most = torch.cat(outs[i]), torch.cat(inner[i]).abs().amax(1)
        others = float(rows[:, 1:].square().mean().sqrt())
        assert 20 < others < 300, i
        if i == LAYER:
            assert (rows[:, 0] / OUTLIER - 1).abs().max() < 0.02
            assert 400 < OUTLIER / others < 800
            assert most.min() > FLOAT16_MAX, "act(gate) * up overflows float16"
        else:
            largest = {LAYER + 1: 0.5, LAYER + 2: 0.05}.get(i, 0.02) * OUTLIER
            assert rows[:, 0].abs().max() < largest, i
            assert most.max() < 1000, i
    assert len(codes.unique()) >= min(1000, len(predictor.head[0])), "codes depend on the input"
    top = teacher_forced_logits(predictor, hidden, codes).topk(2).values
    least = (top[..., 0] - top[..., 1]).amin(1)
    assert 0.03 < least.median() < 0.15, "margin"


def test_bfloat16_weights_in_float32_keep_the_codes_and_bfloat16_throughout_does_not(
    outlier,
) -> None:
    wide, stored = (talker_models(outlier, kind) for kind in (torch.float32, torch.bfloat16))
    given = frame_inputs(wide)
    reference = codes_in(wide.code_predictor, given, torch.float32)
    kept = codes_in(stored.code_predictor, given, torch.float32)
    assert min(same_frames(kept, reference)) >= 0.98
    assert max(same_frames(codes_in(stored.code_predictor, given, torch.bfloat16), reference)) < 0.5


def test_only_talker_and_code_predictor_differ_and_the_same_seed_gives_the_same_bytes(
    tmp_path, checkpoint
) -> None:
    ours, again = (write_tiny_checkpoint(tmp_path / n, outlier=True) for n in ("ours", "again"))
    for file in ours.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    plain = write_tiny_checkpoint(tmp_path / "plain")
    changed = set()
    with Checkpoint(ours).reader() as one, Checkpoint(plain).reader() as other:
        for name in Checkpoint(plain).names:
            if not torch.equal(one.tensor(name), other.tensor(name)):
                changed.add(name.split(".layers.")[0])
    heads = {f"talker.code_predictor.lm_head.{group}.weight" for group in range(15)}
    expected = {"talker.model.norm.weight", "talker.codec_head.weight", *heads}
    assert changed == {*expected, "talker.code_predictor.model"}
    assert read_config(ours).thinker == read_config(plain).thinker
