"""Quantised checkpoints in their published forms: read exactly, kept as they are, or refused."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.files import SINGLE_FILE, Checkpoint, ShardReader, fingerprint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.packing import Groups
from qwen3_omni_neuron.cpu.precision import WeightForm
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import (
    WEIGHTS_FILE,
    _published,
    compile_model,
    expected_bytes,
    load_checkpoint_models,
    load_compiled_models,
)
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.verification.oracle import Reference
from testing.models import load_models
from testing.native_library import needs_c
from testing.quantised_checkpoint import (
    Writer,
    block_fp8,
    fp8,
    gptq,
    int8_exact,
    nvfp4,
    pack_quantized,
    write_quantised_checkpoint,
)
from testing.replies import GREEDY, assert_equal_replies

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

    kept: whether dtypes int8 and int4 keep its numbers.
    """

    writer: Writer
    settings: Mapping[str, Any]
    kept: bool = False


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "extra_config": {"thinker.model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"group_size": 32}, "input_activations": None}},
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BLOCKS_OF_24 = {**BLOCKS, "weight_block_size": [24, 24]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
CASES = {
    "auto-round": Case(gptq(), AUTO_ROUND, kept=True),
    "gptq": Case(gptq(indexed=True), GPTQ, kept=True),
    "pack int4": Case(pack_quantized(), PACKED, kept=True),
    "pack int8": Case(pack_quantized(8), PACKED),
    "modelopt": Case(fp8(static=True), MODELOPT),
    "block fp8": Case(block_fp8(), BLOCKS),
    "block fp8 of 24": Case(block_fp8(24), BLOCKS_OF_24),
    "gptq of 24": Case(gptq(24), {**GPTQ, "group_size": 24}),  # the last group is smaller
    "nvfp4 W4A4": Case(nvfp4(), FP4),
    "nvfp4 W4A16": Case(nvfp4(rounded_inputs=False), FP4),
    "modelopt nvfp4": Case(nvfp4(modelopt=True), MODELOPT),
    "modelopt nvfp4 awq": Case(nvfp4(modelopt=True, smoothed=True), MODELOPT),
}
EVERY_FORM = pytest.mark.parametrize("name", CASES)


@dataclass
class Made:
    """The folders of a form: quantised, and with the weights that its numbers stand for."""

    case: Case
    quantised: Path
    widened: Path


@pytest.fixture(scope="module")
def made_of(checkpoint, tmp_path_factory) -> Callable[[str], Made]:
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
def test_weights_are_the_published_numbers_dequantised(made_of, config, name) -> None:
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
    made_of, config, name, dtype
) -> None:
    """The thinker alone keeps numbers: other stages are loaded as from any checkpoint."""
    made = made_of(name)
    checkpoint = Checkpoint(made.quantised)
    ours = parameters(load_checkpoint_models(checkpoint, config, dtype, ("thinker",), packed=False))
    rounded = parameters(
        load_checkpoint_models(Checkpoint(made.widened), config, dtype, ("thinker",), packed=False)
    )
    if not made.case.kept:
        assert_equal_weights(ours, rounded)
        return
    packed = parameters(
        load_checkpoint_models(checkpoint, config, dtype, ("thinker",), packed=True)
    )
    assert {t.dtype for t in of_thinker_layers(packed).values()} == {torch.uint8}
    exact = parameters(load_models(Checkpoint(made.widened), config, torch.float32))
    layers = of_thinker_layers(exact)
    assert_equal_weights(ours, rounded | layers)
    same = all(torch.equal(rounded[weight], exact[weight]) for weight in layers)
    # Groups of 32 with a bfloat16 scale are int4's own: rounding finds the same numbers.
    assert same == (name == "pack int4" and dtype == "int4")


@pytest.mark.parametrize("packed", [True, False], ids=["for the C", "for torch"])
@pytest.mark.parametrize("name", ["gptq", "modelopt"])
@pytest.mark.diagonal
def test_a_compiled_tree_has_what_the_checkpoint_has(
    made_of, config, tmp_path, name, packed
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
    loaded = load_checkpoint_models(checkpoint, config, "int4", STAGES, packed)
    stored = checkpoint.quantised
    compiled = load_compiled_models(tmp_path, config, "int4", STAGES, packed, stored)
    assert_equal_weights(parameters(compiled), parameters(loaded))
    for module, other in ((compiled.thinker, loaded.thinker), (compiled.talker, loaded.talker)):
        assert_equal_weights(dict(module.named_buffers()), dict(other.named_buffers()))


@needs_c
@pytest.mark.parametrize("name", ["gptq", "pack int4"])
def test_replies_over_kept_numbers_are_those_over_the_dequantised_weights(
    checkpoint, tmp_path, name
) -> None:
    """The thinker in this form, all else as int8 keeps it; one in a compiled tree."""
    case = CASES[name]

    def writer_of(stored: str) -> Writer | None:
        if THINKER.fullmatch(stored):
            return case.writer
        others = TALKER.fullmatch(stored) or OTHERS.fullmatch(stored)
        return int8_exact if others and not EXACT.fullmatch(stored) else None

    folders = write_quantised_checkpoint(checkpoint, tmp_path, writer_of, case.settings)
    replies, tree = [], None
    if name == "gptq":
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
    made_of, name, capsys
) -> None:
    """No input is rounded, although the files have scales for it, and `inspect` says so."""
    made = made_of(name)
    assert cli.main(["inspect", str(made.quantised)]) == 0
    told = "input scales of 84 matrices are ignored: inputs are not rounded to them\n"
    assert told in capsys.readouterr().out
    assert_equal_replies(made.quantised, Reference(made.widened))


def test_a_matrix_of_several_forms_is_widened(checkpoint, tmp_path, config) -> None:
    """In one file q is in bfloat16, one expert in FP8, another in groups of 64, all else in 32."""

    def writer_of(stored: str) -> Writer | None:
        if not THINKER.fullmatch(stored) or stored == f"{QUERY}.weight":
            return None
        if ".1.mlp.experts.3.down_proj" in stored:
            return fp8()
        return gptq(size=64) if ".2.mlp.experts.5.up_proj" in stored else gptq()

    layer = "thinker.model.layers.2.mlp.experts.5.up_proj"
    settings = {**AUTO_ROUND, "extra_config": {layer: {"group_size": 64}}}
    quantised, widened = write_quantised_checkpoint(checkpoint, tmp_path, writer_of, settings)
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


def test_kept_numbers_may_end_in_a_smaller_group(tmp_path) -> None:
    tensors, weights = pack_quantized(4, 64)(torch.randn(40, 96))
    save_file({f"a.{ending}": t for ending, t in tensors.items()}, tmp_path / SINGLE_FILE)
    settings = {**PACKED, "config_groups": {"group_0": {"weights": {"group_size": 64}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    checkpoint = Checkpoint(tmp_path)
    form = WeightForm("published", torch.bfloat16, (40, 96), (40, 96), Groups(64))
    with checkpoint.reader() as reader:
        assert isinstance(reader, ShardReader)
        kept = _published(form, [Piece("a.weight")], reader)
        assert torch.equal(reader.tensor("a.weight"), weights)
    assert torch.equal(form.widen({"a": kept}, "a"), weights)


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
def edited_of(made_of, tmp_path) -> Callable[[str], Edited]:
    def edit(name: str) -> Edited:
        made = made_of(name)
        folder = Path(shutil.copytree(made.quantised, tmp_path / "edited"))
        return Edited(folder, load_file(folder / "model.safetensors"), dict(made.case.settings))

    return edit


# Settings or tensors (of QUERY, by ending; None deletes one) that a form gets, and what is said.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gptq", {"quant_method": "awq"}, {}, "by the method 'awq', which is not supported"),
    ("gptq", {"desc_act": True}, {}, "by gptq with desc_act True, which is not supported"),
    ("gptq", {"sym": False}, {}, "by gptq with sym False"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, {}, "gptq with checkpoint_format 'gptq_v2'"),
    ("auto-round", {"packing_format": "auto_round"}, {}, "packing_format 'auto_round'"),
    ("gptq", {}, {"scales": None}, f"{QUERY} has g_idx, qweight, qzeros: scales is missing"),
    ("gptq", {}, {"qweight": torch.zeros(8, 56, dtype=torch.int32)}, r"shape \[8, 56\]"),
    (
        "pack int4",
        {},
        {"weight_zero_point": torch.zeros(8, 2)},
        "weight_zero_point is not supported",
    ),
    ("pack int4", {}, {"weight_shape": torch.ones(3).long()}, r"weight_shape .* shape \[3\]"),
    ("gptq", {"group_size": 16}, {}, r"inputs are in \d groups, .* 16: none fits"),
    ("gptq", {"group_size": None}, {}, "group_size all inputs: none fits"),
    ("gptq", {"more": {"group_size": 40}}, {}, "group_size 32, 40: more than one fits"),
    ("pack int4", {"config_groups": {}}, {}, "group_size nothing: none fits"),
    ("modelopt", {}, {"weight_scale": None}, f"{QUERY}.weight is of type F8_E4M3, without a scale"),
    ("modelopt", {}, {"weight_scale": torch.ones(64, 1)}, r"shape \[64, 1\] instead of one number"),
    ("modelopt", {}, {"weight": torch.ones(64, 64, dtype=torch.int8)}, "weight is of type I8"),
    ("block fp8 of 24", {}, {"weight_scale_inv": torch.ones(3, 2)}, r"F32 of \[3, 3\]"),
    ("nvfp4 W4A4", {}, {"weight_global_scale": torch.ones(2)}, "not one number"),
    ("nvfp4 W4A4", {}, {"weight_scale": torch.ones(64, 4)}, "expected F8_E4M3 of"),
    ("nvfp4 W4A4", {}, {"weight_packed": None}, f"{QUERY} has .*: weight_packed is missing"),
]


@pytest.mark.parametrize(("name", "settings", "tensors", "said"), REFUSED)
def test_what_is_not_read_is_refused_by_name(edited_of, name, settings, tensors, said) -> None:
    edited = edited_of(name)
    edited.settings = {**(edited.settings or {}), **settings}
    for ending, tensor in tensors.items():
        edited.tensors.pop(f"{QUERY}.{ending}", None)
        if tensor is not None:
            edited.tensors[f"{QUERY}.{ending}"] = tensor
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(edited.write())


def test_zero_points_and_orders_that_the_settings_deny_are_refused(edited_of, config) -> None:
    edited = edited_of("gptq")
    for ending, said in (("g_idx", "groups in another order"), ("qzeros", "off the middle")):
        edited.tensors[f"{EXPERT}.{ending}"][0] += 1
        with pytest.raises(
            CheckpointError, match=rf"{EXPERT}.{ending} has .*{said}.*not supported"
        ):
            load_models(Checkpoint(edited.write()), config, torch.float32)


@pytest.mark.parametrize("name", ["nvfp4 W4A4", "modelopt nvfp4"])
def test_a_scale_of_nvfp4_that_is_not_a_number_is_the_largest(edited_of, name) -> None:
    """vllm-omni reads so what modelopt 0.44 makes of scales that round above 448."""
    edited = edited_of(name)
    scale = edited.tensors[f"{QUERY}.weight_scale"].view(torch.uint8)
    read = []
    for byte in (0x7E, 0x7F, 0xFF):  # 448, and both kinds of not a number
        scale[1, 2] = byte
        with Checkpoint(edited.write()).reader() as reader:
            read.append(reader.tensor(f"{QUERY}.weight"))
    assert torch.equal(read[0], read[1]) and torch.equal(read[0], read[2])


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("quantization_config.json", GPTQ),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {}}),
    ],
)
def test_settings_may_be_in_a_file_of_their_own(edited_of, file, settings) -> None:
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
