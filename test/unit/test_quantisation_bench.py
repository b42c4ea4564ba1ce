"""Rounded weights and other arithmetic compared: formats, and rows over a tiny checkpoint."""

import pytest
import torch
from torch import nn

from bench import quantisation
from bench.quantising.codes import BETWEEN, LOOPS, PREDICTORS, TALKERS
from bench.quantising.rounding import (
    CHOICES,
    ENCODERS,
    FP8_BLOCKS,
    INT4_32,
    INT8,
    SPOKEN_CHOICES,
    STORED,
    Choice,
    Format,
    as_fp8,
    heavy_tailed,
    kind_of,
)
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.compilation.plan import SAME
from qwen3_omni_neuron.cpu.precision import PRECISIONS, Precision, part_precision, weight_form
from qwen3_omni_neuron.cpu.target import LIMITS
from testing.quantised_checkpoint import block_fp8, fp8, nvfp4, pack_quantized
from testing.results import load_results


def relative(matrix: torch.Tensor, right: torch.Tensor) -> float:
    """Return the RMS of the difference of two matrices, relative to that of the second."""
    off = matrix.float() - right.float()
    return float(off.square().mean().sqrt() / right.float().square().mean().sqrt())


def error_of(form: Format, matrix: torch.Tensor) -> float:
    return relative(form.rounded(matrix), matrix)


def test_published_numbers_that_are_widened_are_rounded_anew() -> None:
    """By as much as docs/options.md says of FP8, of 8 bits in groups of 32 and of NVFP4."""
    for writer, own in ((block_fp8(), 0.026), (pack_quantized(8), 0.0055), (nvfp4(), 0.095)):
        normal = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
        published, tailed = writer(normal)[1], writer(heavy_tailed(normal))[1].bfloat16()
        assert relative(published, normal) == pytest.approx(own, abs=0.0005)
        assert relative(published.bfloat16(), published) == pytest.approx(0.0017, abs=0.0001)
        for form, off, most in ((INT8, 0.008, 0.017), (INT4_32, 0.081, 0.108)):
            assert error_of(form, published.bfloat16()) == pytest.approx(off, abs=0.0005)
            assert off < error_of(form, tailed) < most + 0.0005


def test_fp8_is_as_published() -> None:
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for writer, blocks in ((fp8(rows=True), "a row"), (block_fp8(), "128 x 128")):
        assert torch.equal(as_fp8(matrix, *FP8_BLOCKS[blocks]), writer(matrix)[1])


def assert_rounds(choice: Choice, precision: Precision, part: str, module: nn.Module) -> None:
    for target, parameter in module.named_parameters():
        stored = torch.randn(parameter.shape).bfloat16()
        form = weight_form(precision, part, module, target)
        rounded = choice.format_of(kind_of(part, module, target)).rounded(stored)
        tensors = form.keep(target, stored.to(form.read(stored.dtype)))
        kept = form.widen(tensors, target)
        assert torch.equal(rounded.float(), kept), (part, target)


@pytest.mark.parametrize("dtype", ["mixed", "int8", "int4"])
def test_a_choice_named_by_a_dtype_rounds_as_it_does(config, dtype) -> None:
    """Code2wav and tables of rows are rounded by none."""
    models, _ = lay_out(config)
    of_encoders = next(choice for choice in (STORED, *SPOKEN_CHOICES) if dtype in choice.dtypes)
    for part in ENCODERS:
        assert_rounds(of_encoders, PRECISIONS[dtype], part, getattr(models, part))
    for part, choices in CHOICES.items():
        (choice,) = (choice for choice in choices if dtype in choice.dtypes)
        default = LIMITS.predictor_dtypes.get(dtype, (SAME,))[0]
        assert_rounds(choice, part_precision(part, dtype, default), part, getattr(models, part))


@pytest.mark.release
def test_every_choice_is_compared_over_random_weights(tmp_path) -> None:
    file = tmp_path / "r.json"
    words = ["--size", "tiny", "--positions", "8", "--replies", "2", "--frames", "3"]
    assert not quantisation.main([*words, "--json", str(file)])
    rows = load_results(file).rows
    logits = [row for row in rows if row["measure"] == "logits"]
    count = sum(map(len, CHOICES.values()))
    outlier = ["outlier"] * len(CHOICES["code_predictor"])
    assert [row["weights"] for row in logits] == ["stored"] * count + ["tails"] * count + outlier
    for row in logits:
        assert row["positions"] == (8 * 15 if row["model"] == "code predictor" else 8)
        assert 0 <= row["kl_mean"] <= row["kl_max"]
        if "mixed" in row["dtypes"]:
            assert (row["kl_max"], row["agreement"]) == (0, 1)
        else:
            assert 1e-9 < row["kl_mean"] < (100 if row["weights"] == "outlier" else 0.3)
    of_frames = [row for row in rows if row["measure"] == "frames"]
    every = [str(numbers) for numbers in (*TALKERS, *PREDICTORS, *BETWEEN)]
    assert [row["numbers"] for row in of_frames] == every
    of_replies = [row for row in rows if row["measure"] == "replies"]
    assert [(r["talker"], r["predictor"]) for r in of_replies] == [
        (str(talker), str(predictor)) for talker, predictor in LOOPS
    ]
    for row in of_frames:
        same = row["greedy_frames"], row["sampled_frames"]
        assert (same == (1, 1)) if row["numbers"] == "float32" else min(same) <= 1
    assert of_replies[0]["greedy_first"] == of_replies[0]["sampled_first"] == 3
    released = [r for r in of_replies if r["predictor"] == "bfloat16"]
    assert all(row["sampled_first"] < 3 and row["sampled_same"] < 1 for row in released)
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
    of_rows = [row for row in rows if row["measure"] == "encoder" and row["weights"] == "stored"]
    for model in ENCODERS.values():
        found = {r["format"]: r["relative_error"] for r in of_rows if r["model"] == model}
        assert 0 == found["bfloat16"] < found["int8/32"] < found["int8"] < 0.05
        assert 0 < found["computed in bfloat16"] < 0.05
    for published in FP8_BLOCKS:
        of_fp8 = [r for r in rows if r["measure"] == "fp8" and r["published"] == published]
        worst = {
            form: max(r["relative_error"] for r in of_fp8 if r["format"] == form)
            for form in ("bfloat16", "int8/32", "int8")
        }
        assert len(of_fp8) == 2 * 3 * len(kinds - {"shared expert"})
        assert 0 < worst["bfloat16"] < worst["int8/32"] < worst["int8"] < 0.02
