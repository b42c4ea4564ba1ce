"""Quantised checkpoints in their published forms: read exactly, kept as they are, or refused."""

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, fingerprint
from qwen3_omni_neuron.checkpoint.headers import StoredTensor
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models, lay_out
from qwen3_omni_neuron.checkpoint.quantised import QuantisationSettings, quantised_forms
from qwen3_omni_neuron.checkpoint.released import released_config
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.packing import Groups
from qwen3_omni_neuron.cpu.precision import PRECISIONS
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import (
    WEIGHTS_FILE,
    compile_model,
    expected_bytes,
    load_checkpoint_models,
    load_compiled_models,
    weight_forms,
)
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.verification.oracle import Reference
from testing.models import load_models
from testing.native_library import needs_c
from testing.quantised_checkpoint import (
    Writer,
    awq,
    block_fp8,
    fp8,
    gptq,
    int8_rows,
    nvfp4,
    pack_quantized,
    write_quantised_checkpoint,
)
from testing.replies import GREEDY, assert_equal_replies
from testing.tiny.sizes import SIZES, config_dict
from testing.tiny.weights import parameter_shapes

LAYER = r"model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.\w+_proj"
THINKER = re.compile(rf"thinker\.{LAYER}\.weight")
TALKER = re.compile(rf"talker\.{LAYER}\.weight")
OTHERS = re.compile(
    rf"talker\.code_predictor\.{LAYER}\.weight|talker\.code_predictor\.lm_head\.\d+\.weight"
    r"|thinker\.lm_head\.weight|talker\.codec_head\.weight"
)
EXACT = re.compile(r"talker\.code_predictor\..*\.down_proj\.weight")
QUERY = "thinker.model.layers.0.self_attn.q_proj"
EXPERT = "thinker.model.layers.1.mlp.experts.3.down_proj"


@dataclass(frozen=True)
class Case:
    """A form: how the thinker's matrices are written, and what is read of it.

    kept: type of the thinker's numbers in dtypes int8 and int4, None where they are widened.
    """

    writer: Writer
    settings: Mapping[str, Any]
    label: str
    bits: int
    shares: str
    kept: torch.dtype | None


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "extra_config": {"thinker.model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
ROW = "a row"  # an expert's width is one group of 32
INT4, INT8 = torch.uint8, torch.int8
CASES = {
    "auto-round": Case(gptq(), AUTO_ROUND, "GPTQ", 4, "32 inputs", INT4),
    "auto-round asym": Case(
        gptq(symmetric=False, less=0),
        {**AUTO_ROUND, "packing_format": "auto_round", "sym": False},
        "GPTQ v2", 4, "32 inputs", INT4,
    ),
    "gptq": Case(gptq(), GPTQ, "GPTQ", 4, "32 inputs", INT4),
    "gptq sym false": Case(
        gptq(symmetric=False), {**GPTQ, "sym": False}, "GPTQ", 4, "32 inputs", INT4
    ),
    "gptq act order": Case(
        gptq(ordered=True), {**GPTQ, "desc_act": True}, "GPTQ", 4, "32 inputs", INT4
    ),
    "gptq v2": Case(
        gptq(symmetric=False, less=0),
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        "GPTQ v2", 4, "32 inputs", INT4,
    ),
    "gptq int8": Case(
        gptq(bits=8, size=16), {**GPTQ, "bits": 8, "group_size": 16}, "GPTQ", 8, "16 inputs", None
    ),
    "awq": Case(
        awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        "AWQ", 4, "32 inputs", INT4,
    ),
    "pack int4": Case(pack_quantized(), PACKED, "pack-quantized", 4, "32 inputs", INT4),
    "pack int4 asym": Case(
        pack_quantized(symmetric=False), PACKED, "pack-quantized", 4, "32 inputs", INT4
    ),
    "pack int4 order": Case(
        pack_quantized(ordered=True), PACKED, "pack-quantized", 4, "32 inputs", INT4
    ),
    "pack int8": Case(pack_quantized(8, 0), PACKED, "pack-quantized", 8, "a row", INT8),
    "pack int8 groups": Case(
        pack_quantized(8, 16), PACKED, "pack-quantized", 8, "16 inputs", None
    ),
    "pack int8 asym": Case(
        pack_quantized(8, 32, symmetric=False), PACKED, "pack-quantized", 8, "32 inputs", None
    ),
    "int8 rows": Case(int8_rows, FLOATS, "int8", 8, "a row", INT8),
    "fp8 rows": Case(fp8("row"), FLOATS, "FP8", 8, "a row", None),
    "fp8 matrix": Case(fp8("matrix"), FLOATS, "FP8", 8, "a matrix", None),
    "modelopt": Case(fp8("matrix", static=True), MODELOPT, "FP8", 8, "a matrix", None),
    "block fp8": Case(block_fp8(), BLOCKS, "FP8", 8, "a matrix", None),
    "block fp8 of 24": Case(
        block_fp8(24), {**BLOCKS, "weight_block_size": [24, 24]}, "block FP8", 8, "24 x 24", None
    ),
    "reciprocals": Case(
        block_fp8(24, reciprocal=True), {**BLOCKS, "weight_block_size": [24, 24]},
        "block FP8", 8, "24 x 24", None,
    ),
    "nvfp4 W4A4": Case(nvfp4(), FP4, "NVFP4", 4, "16 inputs", None),
    "nvfp4 W4A16": Case(nvfp4(rounded_inputs=False), FP4, "NVFP4", 4, "16 inputs", None),
    "modelopt nvfp4": Case(
        nvfp4(modelopt=True), {**MODELOPT, "quant_algo": "NVFP4"}, "NVFP4", 4, "16 inputs", None
    ),
    "modelopt nvfp4 awq": Case(
        nvfp4(modelopt=True, smoothed=True), {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
        "NVFP4", 4, "16 inputs", None,
    ),
}  # fmt: skip
EVERY_FORM = pytest.mark.parametrize("name", CASES)


@dataclass
class Made:
    """The folders of a form: quantised, and with the weights that its numbers stand for."""

    case: Case
    quantised: Path
    widened: Path


@pytest.fixture(scope="module")
def made_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            case, to = CASES[name], tmp_path_factory.mktemp("form")
            folders = write_quantised_checkpoint(
                checkpoint, to, lambda n: case.writer if THINKER.fullmatch(n) else None,
                case.settings,
            )  # fmt: skip
            found[name] = Made(case, *folders)
        return found[name]

    return make


def parameters(models: Models) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor
        for part, module in vars(models).items()
        if isinstance(module, nn.Module)
        for name, tensor in module.named_parameters()
    }


def assert_equal_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def of_thinker_layers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in weights.items()
        if re.fullmatch(r"thinker\..*(qkv\.weight|out\.weight|gate_up|down)", name)
    }


@EVERY_FORM
def test_weights_are_the_published_numbers_dequantised(
    made_of: Callable[[str], Made], config: OmniConfig, name: str
) -> None:
    """Bit for bit in float32, every part of the model."""
    made = made_of(name)
    ours, theirs = (
        parameters(load_models(Checkpoint(folder), config, torch.float32))
        for folder in (made.quantised, made.widened)
    )
    assert len(of_thinker_layers(ours)) == 12
    assert_equal_weights(ours, theirs)


@EVERY_FORM
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.diagonal
def test_numbers_that_fit_are_kept_and_others_are_rounded_as_any_weight(
    made_of: Callable[[str], Made], config: OmniConfig, name: str, dtype: str
) -> None:
    """The thinker alone keeps numbers: other stages are loaded as from any checkpoint."""
    made = made_of(name)
    checkpoint = Checkpoint(made.quantised)
    ours = parameters(load_checkpoint_models(checkpoint, config, dtype, ("thinker",), packed=False))
    rounded = parameters(
        load_checkpoint_models(Checkpoint(made.widened), config, dtype, ("thinker",), packed=False)
    )
    if made.case.kept is None:
        assert_equal_weights(ours, rounded)
        return
    packed = parameters(
        load_checkpoint_models(checkpoint, config, dtype, ("thinker",), packed=True)
    )
    assert {t.dtype for t in of_thinker_layers(packed).values()} == {made.case.kept}
    exact = parameters(load_models(Checkpoint(made.widened), config, torch.float32))
    layers = of_thinker_layers(exact)
    assert_equal_weights(ours, rounded | layers)
    same = all(torch.equal(rounded[weight], exact[weight]) for weight in layers)
    # Groups of 32 with a bfloat16 scale are int4's own: rounding finds the same numbers.
    assert same == (name == "pack int4" and dtype == "int4")


@pytest.mark.parametrize("packed", [True, False], ids=["for the C", "for torch"])
@pytest.mark.parametrize("name", ["gptq act order", "pack int4 asym", "int8 rows", "fp8 rows"])
@pytest.mark.diagonal
def test_a_compiled_tree_has_what_the_checkpoint_has(
    made_of: Callable[[str], Made], config: OmniConfig, tmp_path: Path, name: str, packed: bool
) -> None:
    folder = made_of(name).quantised
    plan = make_plan(folder, config, LIMITS, dtype="int4", predictor_dtype="same")
    for model in MODELS:
        (tmp_path / model).mkdir()
        compile_model(plan, model, tmp_path / model)
        file = tmp_path / model / WEIGHTS_FILE
        with file.open("rb") as opened:
            header = 8 + int.from_bytes(opened.read(8), "little")
        assert expected_bytes(plan, model) == file.stat().st_size - header
    checkpoint = Checkpoint(folder)
    given: dict[str, Any] = {"compact": plan.compact}
    loaded = load_checkpoint_models(checkpoint, config, "int4", STAGES, packed, **given)
    given["quantised"] = checkpoint.quantised
    compiled = load_compiled_models(tmp_path, config, "int4", STAGES, packed, **given)
    assert_equal_weights(parameters(compiled), parameters(loaded))
    for module, other in ((compiled.thinker, loaded.thinker), (compiled.talker, loaded.talker)):
        assert module is not None and other is not None
        assert_equal_weights(dict(module.named_buffers()), dict(other.named_buffers()))


@needs_c
@pytest.mark.parametrize(
    "name", ["auto-round", "gptq act order", "awq", "pack int4 asym", "pack int8"]
)
def test_replies_over_kept_numbers_are_those_over_the_dequantised_weights(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """The thinker in this form, all else that int4 rounds in int8 rows; one in a compiled tree."""
    case = CASES[name]

    def writer_of(stored: str) -> Writer | None:
        if THINKER.fullmatch(stored):
            return case.writer
        others = TALKER.fullmatch(stored) or OTHERS.fullmatch(stored)
        return int8_rows if others and not EXACT.fullmatch(stored) else None

    folders = write_quantised_checkpoint(checkpoint, tmp_path, writer_of, case.settings)
    replies, tree = [], None
    if name == "gptq act order":
        tree = tmp_path / "tree"
        words = ["compile", "--model", str(folders[0]), "--out", str(tree), "--target", "cpu"]
        assert cli.main([*words, "--dtype", "int4", "--max-concurrency", "1"]) == 0
    for folder, dtype, path in zip(folders, ("int4", "float32"), (tree, None), strict=True):
        with Qwen3Omni.load(folder, dtype=dtype, max_concurrency=1, compiled_path=path) as omni:
            messages = [{"role": "user", "content": "What is it?"}]
            limits = {"thinker_max_new_tokens": 8, "talker_max_new_tokens": 16}
            replies.append(omni.generate_audio(messages, **GREEDY, **limits))
    kept, widened = replies
    assert kept.token_ids == widened.token_ids
    assert len(kept.codes) == 15
    for frame, (ours, theirs) in enumerate(zip(kept.codes, widened.codes, strict=True)):
        assert ours.tolist() == theirs.tolist(), f"frame {frame} is the first that differs"


@pytest.mark.parametrize("name", ["nvfp4 W4A4", "modelopt nvfp4 awq"])
def test_replies_over_nvfp4_are_those_of_transformers_over_its_weights(
    made_of: Callable[[str], Made], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No input is rounded, although the files have scales for it, and `inspect` says so."""
    made = made_of(name)
    assert cli.main(["inspect", str(made.quantised)]) == 0
    told = "scales of the inputs of 84 matrices are left aside: no inputs are rounded\n"
    assert told in capsys.readouterr().out
    assert_equal_replies(made.quantised, Reference(made.widened))


def test_a_matrix_of_several_forms_is_widened(
    checkpoint: Path, tmp_path: Path, config: OmniConfig
) -> None:
    """In one file q is in bfloat16, one expert in FP8, another in groups of 64, all else in 32."""

    def writer_of(stored: str) -> Writer | None:
        if not THINKER.fullmatch(stored) or stored == f"{QUERY}.weight":
            return None
        if ".1.mlp.experts.3.down_proj" in stored:
            return fp8("row")
        return gptq(size=64) if ".2.mlp.experts.5.up_proj" in stored else gptq()

    quantised, widened = write_quantised_checkpoint(checkpoint, tmp_path, writer_of, AUTO_ROUND)
    exact = parameters(load_models(Checkpoint(widened), config, torch.float32))
    ours, rounded = (
        parameters(load_checkpoint_models(Checkpoint(folder), config, "int4", STAGES, False))
        for folder in (quantised, widened)
    )
    mixed = [
        f"thinker.decoder.layers.{name}"
        for name in ("0.attention.qkv.weight", "1.ffn.down", "2.ffn.gate_up")
    ]
    layers = of_thinker_layers(exact)
    assert_equal_weights(ours, rounded | {n: t for n, t in layers.items() if n not in mixed})


def test_the_released_sizes_are_kept_in_groups_of_128() -> None:
    """By names and shapes alone: the thinker's attention and experts as auto-round packs them."""
    ids: Mapping[str, int] = defaultdict(count().__next__)
    shapes = parameter_shapes(config_dict(SIZES["released"], ids, "bfloat16"))
    headers: dict[str, StoredTensor] = {}

    def store(name: str, dtype: str, value_bytes: int, *shape: int) -> None:
        headers[name] = StoredTensor(Path(), dtype, shape, 0, math.prod(shape) * value_bytes)

    for name, shape in shapes.items():
        if THINKER.fullmatch(name):
            (out, into), layer = shape, name.removesuffix(".weight")
            store(f"{layer}.qweight", "I32", 4, into // 8, out)
            store(f"{layer}.qzeros", "I32", 4, into // 128, out // 8)
            store(f"{layer}.scales", "F16", 2, into // 128, out)
        else:
            store(name, "BF16", 2, *shape)
    total = sum(stored.bytes for stored in headers.values())
    assert total / 2**30 == pytest.approx(25, abs=0.6)
    forms, used = quantised_forms(
        headers, QuantisationSettings("GPTQ", group_size=128, symmetric=True)
    )
    assert len(forms) == 48 * (4 + 128 * 3) and len(used) == 3 * len(forms)
    _, parts = lay_out(released_config(), ("thinker",))
    kept = weight_forms(PRECISIONS["int4"], "thinker", parts["thinker"], forms)
    published = [form for form in kept.values() if form.published]
    assert len(published) == 48 * 4
    assert {form.groups for form in published} == {Groups(128, torch.float16)}


# ---- what is not understood


@dataclass
class Edited:
    """A checkpoint in one file, its tensors and its settings, to be changed and written."""

    folder: Path
    tensors: dict[str, Tensor]
    settings: dict[str, Any] | None

    def write(self) -> Path:
        save_file(self.tensors, self.folder / "model.safetensors")
        config = json.loads((self.folder / "config.json").read_text())
        config["quantization_config"] = self.settings
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder


@pytest.fixture
def edited_of(made_of: Callable[[str], Made], tmp_path: Path) -> Callable[[str], Edited]:
    def edit(name: str) -> Edited:
        made = made_of(name)
        folder = Path(shutil.copytree(made.quantised, tmp_path / "edited"))
        tensors = load_file(folder / "model.safetensors")
        return Edited(folder, tensors, dict(made.case.settings))

    return edit


def set_method(edited: Edited) -> None:
    edited.settings = {"quant_method": "quip"}


def set_packing(edited: Edited) -> None:
    edited.settings = {**AUTO_ROUND, "packing_format": "auto_round:marlin"}


def set_version(edited: Edited) -> None:
    edited.settings = {"quant_method": "awq", "version": "gemv"}


def set_group_size(edited: Edited) -> None:
    edited.settings = {**GPTQ, "group_size": "32"}


def set_one_side(edited: Edited) -> None:
    edited.settings = {**BLOCKS, "weight_block_size": [128]}


def set_no_block(edited: Edited) -> None:
    edited.settings = {**BLOCKS, "weight_block_size": [0, 0]}


def drop_settings(edited: Edited) -> None:
    edited.settings = None


def drop_scales(edited: Edited) -> None:
    del edited.tensors[f"{QUERY}.scales"]


def drop_float_scale(edited: Edited) -> None:
    del edited.tensors[f"{QUERY}.weight_scale"]


def add_global_scale(edited: Edited) -> None:
    edited.tensors[f"{QUERY}.weight_scale_2"] = torch.ones(())


def cut_global_scale(edited: Edited) -> None:
    edited.tensors[f"{QUERY}.weight_global_scale"] = torch.ones(2)


def widen_global_scale(edited: Edited) -> None:
    name = f"{QUERY}.weight_global_scale"
    edited.tensors[name] = edited.tensors[name].double()


def widen_scale(edited: Edited) -> None:
    name = f"{QUERY}.weight_scale"
    edited.tensors[name] = edited.tensors[name].float()


def take_groups_of_32(edited: Edited) -> None:
    name = f"{QUERY}.weight_scale"
    edited.tensors[name] = edited.tensors[name][:, ::2].contiguous()


def drop_packed(edited: Edited) -> None:
    del edited.tensors[f"{QUERY}.weight_packed"]


def take_six_bits(edited: Edited) -> None:
    zeros = edited.tensors[f"{QUERY}.qzeros"]
    edited.tensors[f"{QUERY}.qzeros"] = zeros.new_zeros(zeros.shape[0], 12)


def cut_qweight(edited: Edited) -> None:
    edited.tensors[f"{QUERY}.qweight"] = edited.tensors[f"{QUERY}.qweight"][:, :-8].contiguous()


def cut_blocks(edited: Edited) -> None:
    name = f"{QUERY}.weight_scale_inv"
    edited.tensors[name] = edited.tensors[name][:, :-1].contiguous()


def cut_packed(edited: Edited) -> None:
    name = f"{QUERY}.weight_packed"
    edited.tensors[name] = edited.tensors[name][:-1].contiguous()


def lengthen_shape(edited: Edited) -> None:
    edited.tensors[f"{QUERY}.weight_shape"] = torch.ones(3, dtype=torch.int64)


def take_e5m2(edited: Edited) -> None:
    name = f"{QUERY}.weight"
    edited.tensors[name] = edited.tensors[name].float().to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq", set_method, "method 'quip'; implemented: auto-round, awq, compressed-tensors"),
        ("auto-round", set_packing, "'auto_round:marlin'; implemented: auto_round:auto_gptq"),
        ("awq", set_version, "packing of awq is 'gemv'; implemented: gemm"),
        ("gptq", set_group_size, "its group_size is '32', and not a whole number"),
        ("block fp8", set_one_side, r"its blocks are \(128,\), and not rows and inputs"),
        ("block fp8", set_no_block, r"its blocks are \(0, 0\), and not rows and inputs"),
        ("gptq", drop_settings, "no quantization_config says how qweight is packed"),
        ("gptq", drop_scales, f"{QUERY} has qweight, qzeros: scales is missing"),
        ("fp8 rows", drop_float_scale, f"{QUERY}.weight is of type F8_E4M3, and no scale"),
        ("fp8 rows", add_global_scale, "weight is of type F8_E4M3; implemented: U8"),
        ("nvfp4 W4A4", cut_global_scale, r"global_scale has shape \[2\], and not one number"),
        ("nvfp4 W4A4", widen_global_scale, "global_scale is of type F64; implemented: F32"),
        ("nvfp4 W4A4", widen_scale, "weight_scale is of type F32; implemented: F8_E4M3"),
        ("nvfp4 W4A4", take_groups_of_32, r"shape \[64, 2\], and \[64, 4\] was expected"),
        ("nvfp4 W4A4", drop_packed, f"{QUERY} has .*: weight_packed is missing"),
        ("fp8 rows", take_e5m2, "weight is of type F8_E5M2; implemented: F8_E4M3, I8"),
        ("gptq", take_six_bits, "its numbers have 6 bits; implemented: 4 and 8"),
        ("gptq", cut_qweight, r"qweight has shape \[8, 56\], and \[8, 64\] was expected"),
        ("block fp8 of 24", cut_blocks, r"shape \[3, 2\].*64 by 64 has other blocks of 24 by 24"),
        ("pack int4", lengthen_shape, r"weight_shape has shape \[3\], and \[2\] was expected"),
        ("pack int4", cut_packed, r"weight_packed has shape \[63, 8\], and \[64, 8\]"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_not_understood_is_refused_before_it_is_read(
    edited_of: Callable[[str], Edited], name: str, change: Callable[[Edited], None], said: str
) -> None:
    edited = edited_of(name)
    change(edited)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(edited.write())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_without_any_scale_are_refused(
    edited_of: Callable[[str], Edited], dtype: torch.dtype
) -> None:
    """Also where nothing else says that the checkpoint is quantised."""
    edited = edited_of("fp8 rows")
    edited.settings = None
    weights = {n: t for n, t in edited.tensors.items() if not n.endswith("_scale")}
    edited.tensors = {n: t.bfloat16() for n, t in weights.items()}
    Checkpoint(edited.write())
    edited.tensors[f"{QUERY}.weight"] = edited.tensors[f"{QUERY}.weight"].to(dtype)
    with pytest.raises(CheckpointError, match=f"{QUERY}.weight is of type .*8.*, and no scale"):
        Checkpoint(edited.write())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gptq sym false", "qzeros has other zero points than the middle"),
        ("gptq act order", "g_idx has groups in another order"),
    ],
)
def test_zero_points_and_orders_that_the_settings_deny_are_refused(
    edited_of: Callable[[str], Edited], config: OmniConfig, name: str, said: str
) -> None:
    edited = edited_of(name)
    edited.settings = dict(GPTQ)
    with pytest.raises(CheckpointError, match=said):
        load_models(Checkpoint(edited.write()), config, torch.float32)


def test_a_group_that_does_not_exist_is_refused(
    edited_of: Callable[[str], Edited], config: OmniConfig
) -> None:
    edited = edited_of("gptq act order")
    edited.tensors[f"{EXPERT}.g_idx"][5] = 7
    with pytest.raises(CheckpointError, match=f"{EXPERT}.g_idx names groups 0 to 7, and there"):
        load_models(Checkpoint(edited.write()), config, torch.float32)


def test_different_orders_of_one_matrix_are_refused_where_numbers_are_kept(
    edited_of: Callable[[str], Edited], config: OmniConfig
) -> None:
    edited = edited_of("gptq act order")
    edited.tensors[f"{QUERY}.g_idx"] = edited.tensors[f"{QUERY}.g_idx"].flip(0)
    checkpoint = Checkpoint(edited.write())
    with pytest.raises(CheckpointError, match=f'{QUERY}.weight, .* orders.* dtype "mixed"'):
        load_checkpoint_models(checkpoint, config, "int4", STAGES, packed=True)
    load_checkpoint_models(checkpoint, config, "mixed", STAGES, packed=True)


def test_groups_of_different_sizes_are_refused_where_numbers_are_kept(
    edited_of: Callable[[str], Edited], config: OmniConfig
) -> None:
    edited = edited_of("gptq act order")
    name = "thinker.model.layers.0.self_attn.o_proj"
    edited.tensors[f"{name}.g_idx"].fill_(0)
    with pytest.raises(CheckpointError, match=rf'{name}.weight .*64 inputs are in 2.*"mixed"'):
        load_checkpoint_models(Checkpoint(edited.write()), config, "int4", STAGES, packed=True)
    load_checkpoint_models(Checkpoint(edited.folder), config, "mixed", STAGES, packed=True)


@pytest.mark.parametrize("name", ["nvfp4 W4A4", "modelopt nvfp4"])
def test_a_scale_of_nvfp4_that_is_not_a_number_is_the_largest(
    edited_of: Callable[[str], Edited], name: str
) -> None:
    """vllm-omni reads so what modelopt 0.44 makes of scales that round above 448."""
    edited = edited_of(name)
    scale = edited.tensors[f"{QUERY}.weight_scale"].view(torch.uint8)
    read = []
    for byte in (0x7E, 0x7F, 0xFF):  # 448, and both kinds of not a number
        scale[1, 2] = byte
        with Checkpoint(edited.write()).reader() as reader:
            read.append(reader.tensor(f"{QUERY}.weight"))
    assert torch.equal(read[0], read[1]) and torch.equal(read[0], read[2])


@pytest.mark.parametrize("name", ["scales", "extra"])
def test_scales_of_caches_and_activations_are_left_aside(
    edited_of: Callable[[str], Edited], config: OmniConfig, name: str
) -> None:
    edited = edited_of("modelopt")
    stem = QUERY.removesuffix(".q_proj")
    if name == "scales":
        edited.tensors[f"{stem}.k_proj.k_scale"] = torch.ones(())
        edited.tensors[f"{stem}.v_scale"] = torch.ones(())
        load_models(Checkpoint(edited.write()), config, torch.float32)
        return
    edited.tensors[f"{stem}.k_proj.bits"] = torch.ones(())
    with pytest.raises(CheckpointError, match=r"unknown 1 parameters: .*k_proj\.bits"):
        load_models(Checkpoint(edited.write()), config, torch.float32)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("quantization_config.json", GPTQ),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {}}),
    ],
)
def test_settings_may_be_in_a_file_of_their_own(
    edited_of: Callable[[str], Edited], file: str, settings: dict[str, Any]
) -> None:
    edited = edited_of("gptq" if settings is GPTQ else "modelopt")
    edited.settings = None
    (edited.write() / file).write_text(json.dumps(settings))
    assert f"{QUERY}.weight" in Checkpoint(edited.folder).quantised
    before = fingerprint(edited.folder)
    (edited.folder / file).write_text(json.dumps({**settings, "changed": True}))
    assert fingerprint(edited.folder) != before
    (edited.folder / file).write_text(json.dumps({"producer": {"name": "quip"}}))
    with pytest.raises(CheckpointError, match="method 'quip'"):
        Checkpoint(edited.folder)


# ---- codes that code2wav does not have


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("talker_config", "text_config", "vocab_size"), 1089, "codes up to 64, and .* is 64"),
        (
            ("talker_config", "code_predictor_config", "vocab_size"),
            65,
            "code_predictor_config.vocab_size lets the talker draw codes up to 64",
        ),
        (("talker_config", "codec_eos_token_id"), 12, None),
        (("code2wav_config", "codebook_size"), 63, "codes up to 63, and .*codebook_size is 63"),
        (("code2wav_config", "num_quantizers"), 15, "num_code_groups is 16, and .* is 15"),
    ],
)
def test_a_talker_that_may_draw_codes_that_do_not_exist_is_refused(
    checkpoint: Path, tmp_path: Path, keys: tuple[str, ...], value: int, said: str | None
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    section = config
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    if said is None:
        read_config(tmp_path)
        return
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path)


# ---- what is shown


@EVERY_FORM
def test_inspect_shows_form_bits_groups_and_bytes(
    made_of: Callable[[str], Made], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_of(name)
    assert cli.main(["inspect", str(made.quantised)]) == 0
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:5] == ["part", "form", "bits", "a scale for", "tensors"]
    case, stored = made.case, load_file(made.quantised / "model.safetensors")
    sizes = {name: form.bytes for name, form in Checkpoint(made.quantised).quantised.items()}
    assert len(sizes) == 84 and all(map(THINKER.fullmatch, sizes))
    layers = {name.removesuffix(".weight") for name in sizes}
    parts = {n: t for n, t in stored.items() if n.rpartition(".")[0] in layers}
    assert sum(sizes.values()) == sum(
        tensor.nbytes for name, tensor in parts.items() if "input" not in name.rpartition(".")[2]
    )
    forms = [row for row in rows[1:] if len(row) == len(rows[0])]
    use = "kept" if case.kept else "widened"
    known = {("thinker", case.label, str(case.bits), shares, use) for shares in (case.shares, ROW)}
    assert {(*row[:4], row[6]) for row in forms} <= known and case.shares == forms[0][3]
    assert sum(int(row[4]) for row in forms) == 84
    megabytes = sum(float(row[5]) for row in forms)
    assert megabytes == pytest.approx(sum(sizes.values()) / 1e6, abs=0.05 * len(forms))
    assert [row[:3] for row in rows if row[0] == "talker"] == [["talker", "bfloat16", "16"]]
