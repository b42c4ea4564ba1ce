"""Rounded weights compared: formats, the planted outlier, and rows over a tiny checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import quantisation
from bench.common.results import load_results
from bench.quantising.cases import Weights
from bench.quantising.outlier import OUTLIER, outlier_layer, plant_outlier
from bench.quantising.rounding import (
    CHOICES,
    INT4_32,
    INT4_128,
    INT8,
    INT8_32,
    INT8_128,
    Format,
    heavy_tailed,
    kind_of,
)
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.cpu.precision import PRECISIONS, weight_form
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, RopeConfig
from qwen3_omni_neuron.model.decoder import DecoderLayer
from testing.packed import randomize
from testing.released import TALKER
from testing.teacher_forcing import teacher_forced_logits


def error_of(form: Format, matrix: torch.Tensor) -> float:
    off = form.rounded(matrix) - matrix.float()
    return float(off.square().mean().sqrt() / matrix.float().square().mean().sqrt())


def test_smaller_groups_are_closer_and_heavy_tails_are_worse() -> None:
    normal = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    heavy = heavy_tailed(normal)
    assert float(heavy.float().std()) == pytest.approx(float(normal.float().std()), rel=0.01)
    for coarser, finer in ((INT8, INT8_128), (INT8_128, INT8_32), (INT4_128, INT4_32)):
        assert error_of(finer, normal) < error_of(coarser, normal) < error_of(coarser, heavy)
    assert error_of(INT8, normal) == pytest.approx(0.008, abs=0.002)
    assert error_of(INT4_32, normal) == pytest.approx(0.081, abs=0.001)


@pytest.mark.parametrize("dtype", ["mixed", "int8", "int4"])
def test_a_choice_named_by_a_dtype_rounds_as_it_does(config: OmniConfig, dtype: str) -> None:
    """The vision encoder, code2wav and tables of rows are rounded by none."""
    models, _ = lay_out(config)
    for part, choices in CHOICES.items():
        (choice,) = (choice for choice in choices if dtype in choice.dtypes)
        module = getattr(models, part)
        for target, parameter in module.named_parameters():
            stored = torch.randn(parameter.shape).bfloat16()
            form = weight_form(PRECISIONS[dtype], part, module, target)
            rounded = choice.format_of(kind_of(part, module, target)).rounded(stored)
            assert torch.equal(rounded, form.rounded(stored.to(form.read_as))), (part, target)


def test_the_outlier_is_there_after_its_layer_and_not_at_the_end() -> None:
    predictor = DecoderConfig(
        64, 5, 4, 2, 16, 192, 128, 64, 1e-6, RopeConfig(10000.0)
    )  # hidden size, layers, heads, KV heads, head size, MLP, vocabulary, positions
    text = DecoderConfig(64, 1, 4, 2, 16, 64, 200, 64, 1e-6, RopeConfig(10000.0))
    c = replace(TALKER, text=text, predictor=predictor)
    module = CodePredictor(c, torch.nn.Embedding(200, 64)).requires_grad_(False).bfloat16()
    randomize(module)
    plant_outlier(dict(module.named_parameters()), predictor.layers)
    module = module.float()
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: DecoderLayer, _: Any, out: torch.Tensor) -> None:
        index = list(module.decoder.layers).index(layer)
        seen[index] = torch.cat((seen.get(index, out[:0]), out))

    for layer in module.decoder.layers:
        layer.register_forward_hook(keep)
    codes = torch.randint(128, (3, c.code_groups))
    logits = teacher_forced_logits(module, torch.randn(3, 64), codes)
    assert outlier_layer(predictor.layers) == 2
    for index, rows in seen.items():
        most = rows.abs().amax(1)
        if index in (2, 3):
            assert most.min() > 0.99 * OUTLIER and most.max() < 1.01 * OUTLIER
        else:
            assert most.max() < 400
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).flatten().tolist())) > 10, "codes still depend on the input"


def test_every_choice_is_compared_over_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    assert not quantisation.main(["--size", "tiny", "--positions", "8", "--json", str(file)])
    rows = load_results(file).rows
    logits = [row for row in rows if row["measure"] == "logits"]
    count = sum(map(len, CHOICES.values()))
    assert [row["weights"] for row in logits] == ["stored"] * count + ["tails"] * count
    for row in logits:
        assert row["positions"] == (8 * 15 if row["model"] == "code predictor" else 8)
        assert 0 <= row["kl_mean"] <= row["kl_max"]
        if "mixed" in row["dtypes"]:
            assert (row["kl_max"], row["agreement"]) == (0, 1)
        else:
            assert 1e-9 < row["kl_mean"] < 0.3
    errors = {
        (row["model"], row["matrix"], row["format"]): row["relative_error"]
        for row in rows
        if row["measure"] == "matrix" and row["weights"] == "stored"
    }
    kinds = {kind for model, kind, _ in errors if model == "talker"}
    assert kinds == {
        *("attention in", "attention out", "gate and up", "down", "shared expert", "head")
    }
    for (model, kind, form), error in errors.items():
        if form == "int8/32":
            assert error <= errors[model, kind, "int8"] < 0.02


def test_what_cannot_be_measured_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantisation.main(["--assess", "3"]) == 1
    assert "Name it by --model" in capsys.readouterr().err
    assert quantisation.main(["--model", str(tmp_path)]) == 1


def test_tails_are_those_of_matrices_alone(checkpoint: Path, config: OmniConfig) -> None:
    plain, heavy = (Weights(checkpoint, config, tails).predictor for tails in (False, True))
    before, after = (make(CHOICES["code_predictor"][0]).code_predictor for make in (plain, heavy))
    assert before is not None and after is not None
    changed = {
        name
        for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert "head" in changed and "embedding" not in changed
    assert not any("norm" in name for name in changed)
