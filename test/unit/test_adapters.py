"""LoRA adapters: merged as PEFT merges them, wherever weights are read, or refused by name."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.adapters import AdapterPath, adapters_digest
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, conversation_fingerprint, fingerprint
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.compilation import runner
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.target import CPU, LIMITS
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models, load_compiled_models
from qwen3_omni_neuron.errors import ArtifactError, CheckpointError
from qwen3_omni_neuron.verification.verify import verify
from testing.quantised_checkpoint import (
    Writer,
    fp8,
    gptq,
    nvfp4,
    pack_quantized,
    write_quantised_checkpoint,
)
from testing.replies import GREEDY
from testing.tiny import write_tiny_checkpoint
from testing.verified import short_questions

QUERY = "thinker.model.layers.0.self_attn.q_proj"
KEY = "thinker.model.layers.1.self_attn.k_proj"
EXPERT = "thinker.model.layers.1.mlp.experts.3.down_proj"
SOUND = "thinker.audio_tower.layers.0.self_attn.v_proj"
PICTURE = "thinker.visual.blocks.0.attn.qkv"
SPEECH = "talker.model.layers.0.mlp.shared_expert.up_proj"
LAYERS = (QUERY, KEY, EXPERT, SOUND, PICTURE, SPEECH)
RANK = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny checkpoint in float32."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("base"), 5, dtype="float32")


@pytest.fixture(scope="module")
def weights(base) -> dict[str, Tensor]:
    return {n: t for file in base.glob("*.safetensors") for n, t in load_file(file).items()}


def factors(weights: Mapping[str, Tensor], layer: str, seed: int = 0, rank: int = RANK) -> Any:
    """Draw A and B of a layer: names in the checkpoint, tensors of PEFT."""
    out, into = weights[f"{layer}.weight"].shape
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*s, generator=draw) * 0.05 for s in ((rank, into), (out, rank)))
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


def write(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True)
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, weights) -> Path:
    tensors = {n: t for layer in LAYERS for n, t in factors(weights, layer).items()}
    return write(tmp_path_factory.mktemp("adapter") / "lora", tensors)


def read(base: Path, name: str, *adapters: Path | tuple[Path, float]) -> Tensor:
    """Return a stored tensor with adapters merged."""
    with Checkpoint(base, [AdapterPath.of(one) for one in adapters]).reader() as reader:
        assert not adapters or reader.dtype(name) == torch.float32
        return reader.tensor(name)


def delta(tensors: Mapping[str, Tensor], layer: str, scale: float) -> Tensor:
    return (tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]) * scale


def test_factors_and_weights_of_half_precision_are_merged_in_float32(weights, tmp_path) -> None:
    half = write_tiny_checkpoint(tmp_path / "base", 5, dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in factors(weights, QUERY).items()}
    widened = {name: tensor.float() for name, tensor in tensors.items()}
    stored = read(half, f"{QUERY}.weight")
    assert stored.dtype == torch.bfloat16
    expected = stored.float() + delta(widened, QUERY, 6 / RANK)
    assert torch.equal(read(half, f"{QUERY}.weight", write(tmp_path / "one", tensors)), expected)


@pytest.mark.parametrize(
    "written",
    [
        "base_model.model.{}",
        "thinker.base_model.model.{short}",  # as one trainer wrote them for a time
        "base_model.model.{short}",  # of a thinker that was trained alone
        "base_model.model.thinker.model.language_model.layers.0.self_attn.q_proj",  # transformers 5
        "{}",
    ],
)
@pytest.mark.parametrize("ending", ["{}.weight", "{}.default.weight"])
def test_names_of_other_programs_are_the_checkpoints(
    base, weights, tmp_path, written, ending
) -> None:
    tensors = factors(weights, QUERY)
    folder, file = write(tmp_path / "one", {}), tmp_path / "one" / "adapter_model.safetensors"
    layer = written.format(QUERY, short=QUERY.removeprefix("thinker."))
    a, b = (f"{layer}.{ending.format(kind)}" for kind in ("lora_A", "lora_B"))
    save_file(dict(zip((a, b), tensors.values(), strict=True)), file)
    expected = weights[f"{QUERY}.weight"] + delta(tensors, QUERY, 6 / RANK)
    assert torch.equal(read(base, f"{QUERY}.weight", folder), expected)


def test_encoders_names_of_transformers_5_are_the_checkpoints(
    base, weights, adapter, tmp_path
) -> None:
    tensors = factors(weights, SOUND) | factors(weights, PICTURE)
    held = {n.replace("thinker.", "thinker.model."): t for n, t in tensors.items()}
    folder = write(tmp_path / "one", held)
    for name in (f"{SOUND}.weight", f"{PICTURE}.weight"):
        assert torch.equal(read(base, name, folder), read(base, name, adapter))


STACK = "thinker.model.layers.1.mlp.experts"
EXPERT_COUNT = 8


def stack(out: int, into: int, rank: int = RANK, name: str = STACK) -> dict[str, Tensor]:
    """Draw A and B of a layer's experts, as PEFT's target_parameters have them."""
    a, b = (
        torch.randn(*s) * 0.05 for s in ((EXPERT_COUNT * rank, into), (out, EXPERT_COUNT * rank))
    )
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


def test_stacks_that_do_not_fit_are_refused(base, weights, tmp_path) -> None:
    width, hidden = weights[f"{STACK}.0.gate_proj.weight"].shape
    down = stack(hidden, width)
    need = f"{STACK}.gate_up_proj and adapter_config.json need"
    for number, (tensors, message) in enumerate(
        (
            (stack(width, hidden), rf"lora_B.* {need} \[{2 * width}, {EXPERT_COUNT * RANK}\]"),
            (stack(hidden, 3), rf"lora_A.* {need} \[{EXPERT_COUNT * RANK}, {hidden}\]"),
            (stack(hidden, width, 3), r"lora_A.*experts.down_proj and .* need \[32, "),
            (dict([next(iter(down.items()))]), f"lacks A or B for {STACK}"),
        )
    ):
        folder = write(tmp_path / str(number), tensors)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(base, [AdapterPath(folder)])


@pytest.mark.parametrize(
    ("settings", "renamed", "message"),
    [
        ({"peft_type": "IA3"}, {}, "has peft_type 'IA3': .* merge_and_unload"),
        ({"bias": "all"}, {}, "has bias 'all': only LoRA and rsLoRA over linear"),
        ({"use_dora": True}, {}, "has use_dora True: .* merge_and_unload"),
        ({"modules_to_save": ["codec_head"]}, {}, "has modules_to_save .*merge_and_unload"),
        ({"init_lora_weights": "pissa"}, {}, "has init_lora_weights 'pissa'"),
        ({"new_in_some_version": 3}, {}, "has new_in_some_version 3"),
        ({"r": 8}, {}, r"lora_A.weight of F32 \[4, \d+\]; .* need \[8, "),
        ({"rank_pattern": {"(a+)+b": 4}}, {}, "only layers' names, or ends"),
        (
            {"base_model_name_or_path": "Qwen/Qwen2.5-Omni-7B"},
            {QUERY: "thinker.model.layers.9.self_attn.q_proj"},
            "checkpoint has no thinker.model.layers.9.self_attn.q_proj.weight. It was trained on "
            "'Qwen/Qwen2.5-Omni-7B'",
        ),
        ({}, {".lora_": ".lora_embedding_"}, "not a LoRA factor A or B .* merge_and_unload"),
        ({}, {QUERY: "thinker.audio_tower.conv2d1"}, r"of shape \[\d+, 1, 3, 3\], which is no"),
        ({}, {QUERY: EXPERT}, "need .* trained on another checkpoint"),
    ],
)
def test_what_is_not_implemented_or_does_not_fit_is_refused_by_name(
    base, weights, tmp_path, settings, renamed, message
) -> None:
    tensors = factors(weights, QUERY)
    for layer, other in renamed.items():
        tensors = {name.replace(layer, other): tensor for name, tensor in tensors.items()}
    folder = write(tmp_path / "one", tensors, **settings)
    with pytest.raises(CheckpointError, match=f"The adapter {re.escape(str(folder))} .*{message}"):
        Checkpoint(base, [AdapterPath(folder)])


def test_a_lone_factor_other_types_and_missing_files_are_refused(base, weights, tmp_path) -> None:
    pair = factors(weights, QUERY)
    lone = dict([next(iter(pair.items()))])
    whole = {name: tensor.int() for name, tensor in pair.items()}
    none = write(tmp_path / "none", pair)
    (none / "adapter_model.safetensors").rename(none / "adapter_model.bin")
    for folder, message in (
        (write(tmp_path / "lone", lone), "lacks A or B for"),
        (write(tmp_path / "whole", whole), "lora_A.weight of I32 .* in F32, F16, BF16"),
        (none, "has no adapter_model.safetensors. Save it by PEFT's save_pretrained"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(base, [AdapterPath(folder)])
    (tmp_path / "lone" / "adapter_config.json").unlink()
    for refused in (Checkpoint, fingerprint):
        with pytest.raises(CheckpointError, match=r"can't be read: .*No such file"):
            refused(base, [AdapterPath(tmp_path / "lone")])


def test_a_file_without_what_its_settings_name_is_refused(base, weights, tmp_path) -> None:
    query, value = (
        factors(weights, QUERY.replace("q_proj", name)) for name in ("q_proj", "v_proj")
    )
    named = {"target_modules": ["q_proj", "self_attn.v_proj", "codec_head"]}
    for number, (tensors, settings, message) in enumerate(
        (
            ({}, {}, "has no tensors"),
            (query, named, "has no tensors for .*0.self_attn.v_proj, which its target_modules"),
            (query | value, named, ""),
            (query, {"target_modules": r".*\.[qv]_proj"}, ""),
            (query, {**named, "exclude_modules": ["v_proj"]}, ""),
        )
    ):
        folder = write(tmp_path / str(number), tensors, **settings)
        if not message:
            Checkpoint(base, [AdapterPath(folder)])
            continue
        with pytest.raises(CheckpointError, match=f"The adapter {folder} {message}"):
            Checkpoint(base, [AdapterPath(folder)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_merged_matrix_that_is_not_finite_is_refused_by_name(
    base, weights, tmp_path, value
) -> None:
    for layer in (QUERY, EXPERT, SPEECH):
        tensors = factors(weights, layer)
        tensors[f"{layer}.lora_A.weight"][1, 2] = value
        tensors[f"{layer}.lora_B.weight"] *= 1e3  # with which 3e38 overflows
        folder = write(tmp_path / layer, tensors)
        given = Checkpoint(base, [AdapterPath(folder)])
        said = rf"{layer}\.weight with the adapter {folder} is NaN or infinite in \d+ of"
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint_models(given, read_config(base), "int8", STAGES, packed=True)


def test_over_drawn_weights_an_adapter_is_refused(tmp_path, adapter) -> None:
    drawn = write_tiny_checkpoint(tmp_path / "drawn", drawn=True)
    with pytest.raises(CheckpointError, match="no adapter can be merged"):
        Checkpoint(drawn, [AdapterPath(adapter)])


def test_adapters_their_order_and_weights_are_part_of_fingerprints(
    base, weights, adapter, tmp_path
) -> None:
    other = write(tmp_path / "other", factors(weights, QUERY, seed=1))
    again = Path(shutil.copytree(adapter, tmp_path / "again"))
    one, two = AdapterPath(adapter), AdapterPath(other)
    alpha = AdapterPath(write(tmp_path / "alpha", factors(weights, QUERY, seed=1), lora_alpha=7))
    half = AdapterPath(adapter, 0.5)
    assert str(half) == f"{adapter}=0.5"
    given = [(), (one,), (two,), (one, two), (two, one), (half,), (alpha,)]
    for of in (fingerprint, conversation_fingerprint):
        assert len({of(base, adapters) for adapters in given}) == len(given)
        assert of(base) == of(base, ())
        assert of(base, [one]) == of(base, [AdapterPath(again)])
    assert adapters_digest([one]) != adapters_digest([two])


def test_every_number_of_an_adapter_is_part_of_its_digest(weights, tmp_path) -> None:
    """A checkpoint's tensors are hashed in their middle alone: they are a thousand times more."""
    folder = write(tmp_path / "one", factors(weights, QUERY))
    file, found = folder / "adapter_model.safetensors", set()
    content = file.read_bytes()
    for place in (-1, -RANK * 16, -len(content) // 2):
        changed = bytearray(content)
        changed[place] ^= 1
        for written in (content, changed):
            file.write_bytes(written)
            found.add(adapters_digest([AdapterPath(folder)]))
    assert len(found) == 4
    with pytest.raises(CheckpointError, match=f"The adapter {tmp_path} can't be read: .*No such"):
        adapters_digest([AdapterPath(tmp_path)])


def test_a_tree_holds_the_merged_weights_and_asks_for_its_adapters(
    base, weights, adapter, tmp_path, capsys, monkeypatch
) -> None:
    def compile_here(compile_model: Any, plan: Any, model: str, part: Path, *_: Any) -> Any:
        return compile_model(plan, model, part)

    monkeypatch.setattr(runner, "run_worker", compile_here)  # processes take seconds
    other = write(tmp_path / "other", factors(weights, QUERY, seed=1))
    config, given, tree = read_config(base), [AdapterPath(adapter)], tmp_path / "tree"
    given.append(AdapterPath(other, 0.5))
    plan = make_plan(base, config, LIMITS, adapters=given, dtype="bfloat16")
    assert f"--adapter {adapter} --adapter {other}=0.5" in plan.command(tree)
    compile_tree(plan, tree, CPU)
    compiled = load_compiled_models(tree, config, "bfloat16", STAGES, packed=False)
    direct = load_checkpoint_models(
        Checkpoint(base, given), config, "bfloat16", STAGES, packed=False
    )
    plain = load_checkpoint_models(Checkpoint(base), config, "bfloat16", STAGES, packed=False)
    for name in ("thinker", "audio_encoder", "vision_encoder", "talker"):
        changed = 0
        unlike = dict(getattr(plain, name).named_parameters())
        for (key, ours), theirs in zip(
            getattr(compiled, name).named_parameters(),
            getattr(direct, name).parameters(),
            strict=True,
        ):
            assert torch.equal(ours, theirs), key
            changed += not torch.equal(ours, unlike[key])
        assert changed == (3 if name == "thinker" else 1), name
    assert cli.main(["inspect", str(tree)]) == 0
    lines = f"adapter: {adapter} merged into 6 weights\nadapter: {other}=0.5 merged into 1 weights"
    assert f"\n{lines}\n" in capsys.readouterr().out
    named = [adapter, (other, 0.5)]
    with Qwen3Omni.load(base, compiled_path=tree, adapters=named) as omni:
        assert omni.checkpoint_fingerprint == conversation_fingerprint(base, given)
    again = shutil.copytree(other, tmp_path / "again")
    message = f"it has {adapter} merged into 6 weights and {other}=0.5 merged into 1 weights"

    def refused(*adapters: Path | tuple[Path, float]) -> None:
        with pytest.raises(ArtifactError, match=re.escape(message)):
            Qwen3Omni.load(base, compiled_path=tree, adapters=adapters)

    refused()
    refused(adapter)
    refused(adapter, other)
    refused(*reversed(named))
    refused(adapter, (adapter, 0.5))
    moved = [given[0], AdapterPath(again, 0.5)]
    for adapters in (moved, given):
        same = make_plan(base, config, LIMITS, adapters=adapters, dtype="bfloat16")
        assert not compile_tree(same, tree, CPU).compiled
    shutil.rmtree(other)
    write(other, factors(weights, QUERY, seed=2))
    refused(*named)
    assert compile_tree(plan, tree, CPU).compiled == MODELS
    without = make_plan(base, config, LIMITS, dtype="bfloat16")
    assert compile_tree(without, tree, CPU).compiled == MODELS


FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FORMS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "GPTQ": (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "pack-quantized": (pack_quantized(), FLOATS | {"format": "pack-quantized", "group_size": 32}),
    "NVFP4": (nvfp4(), FLOATS | {"format": "nvfp4-pack-quantized"}),
    "modelopt": (nvfp4(modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "FP8": (fp8(), FLOATS),
}


@pytest.mark.parametrize("form", FORMS)
def test_over_any_quantised_form_the_weights_that_it_stands_for_are_merged(
    base, weights, tmp_path, form
) -> None:
    name, (writer, settings) = f"{QUERY}.weight", FORMS[form]
    quantised, widened = write_quantised_checkpoint(
        base, tmp_path, lambda of: writer if of == name else None, settings
    )
    folder = write(tmp_path / "one", factors(weights, QUERY))
    assert torch.equal(read(quantised, name, folder), read(widened, name, folder))
    assert (
        Checkpoint(quantised).quantised
        and not Checkpoint(quantised, [AdapterPath(folder)]).quantised
    )


@pytest.mark.skipif(find_library() is None, reason="the C was not compiled, which reads 4 bits")
def test_auto_rounds_no_merged_matrix_to_4_bits(base, weights, tmp_path) -> None:
    """In int4 those that are one matrix with it would lose as much as an adapter adds."""
    matrix = re.compile(r"thinker\.(?:model\.layers.*_proj|lm_head)\.weight")
    quantised, widened = write_quantised_checkpoint(
        base,
        tmp_path,
        lambda name: gptq() if matrix.fullmatch(name) else None,
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
    )
    config, chosen = read_config(base), {}
    for layer in (QUERY, SPEECH):
        chosen[layer] = [AdapterPath(write(tmp_path / layer, factors(weights, layer)))]
        plan = make_plan(quantised, config, LIMITS, adapters=chosen[layer])
        assert plan.dtype == ("int8" if layer == QUERY else "int4")
    assert make_plan(quantised, config, LIMITS).dtype == "int4"
    checkpoint = Checkpoint(quantised, chosen[QUERY])
    models = load_checkpoint_models(checkpoint, config, "int8", ["thinker"], packed=False)
    for number in (0, 1):
        found = models.thinker.get_parameter(f"decoder.layers.{number}.attention.qkv.weight")
        layer, given = f"thinker.model.layers.{number}.self_attn", [a.folder for a in chosen[QUERY]]
        expected = torch.cat(
            [read(widened, f"{layer}.{part}_proj.weight", *given) for part in "qkv"]
        )
        error = torch.linalg.norm(found - expected) / torch.linalg.norm(expected)
        assert 0 < error < 0.01 if number == 0 else error == 0


def test_a_reply_with_an_adapter_is_transformers_over_the_merged_weights(
    base, weights, tmp_path
) -> None:
    from qwen3_omni_neuron.verification.oracle import Reference
    from qwen3_omni_neuron.verification.write import merged_checkpoint

    layers = (QUERY, EXPERT, SPEECH)
    tensors = {n: 8 * t for layer in layers for n, t in factors(weights, layer).items()}
    folder = write(tmp_path / "one", tensors)
    asked: dict[str, Any] = {**GREEDY, "thinker_max_new_tokens": 12, "talker_max_new_tokens": 12}
    with Qwen3Omni.load(base, dtype="float32", max_concurrency=1) as omni:
        plain = omni.generate_audio("Say a word.", ignore_eos=True, **asked)
    with Qwen3Omni.load(base, dtype="float32", max_concurrency=1, adapters=[folder]) as omni:
        ours = omni.generate_audio("Say a word.", ignore_eos=True, **asked)
        prompt = omni.prompt_builder.prompt([{"role": "user", "content": "Say a word."}])
        assert omni.checkpoint_fingerprint == conversation_fingerprint(base, [AdapterPath(folder)])
    with merged_checkpoint(base, [AdapterPath(folder)]) as merged:
        reference = Reference(merged)
    theirs = reference.generate(
        prompt, thinker_max_new_tokens=12, talker_max_new_tokens=12, speaker="ethan"
    )
    assert list(ours.token_ids) == theirs.token_ids != list(plain.token_ids)
    assert ours.codes.tolist() == theirs.codes.tolist()


def test_verify_takes_references_with_its_adapters_alone(
    adapter, tmp_path, capsys, monkeypatch
) -> None:
    """It is merged for transformers, too, and rounded to bfloat16 as weights of `mixed` are."""
    from qwen3_omni_neuron.verification import reference, write

    path, asked = tmp_path / "reference.npz", short_questions()[2:]
    monkeypatch.setattr(reference, "make_questions", lambda: asked)
    monkeypatch.setattr(write, "ROUNDED", ("mixed",))  # seconds each
    base = write_tiny_checkpoint(tmp_path / "base", 5)
    given = ["verify", "--model", str(base), "--adapter", str(adapter)]
    assert cli.main([*given, "--write", str(path)]) == 0
    for dtype in ("mixed", "float32"):
        load = {"dtype": dtype, "adapters": [adapter]}
        assert verify(base, path, load).holds
    for wrong in (given[:-2], [*given[:-1], f"{adapter}=0.5"]):
        assert cli.main([*wrong, "--against", str(path)]) == 1
        assert "with other adapters" in capsys.readouterr().err


def test_the_command_line_names_a_wrong_adapter(base, tmp_path, capsys) -> None:
    wrong = str(tmp_path / "none")
    for words in (
        ["say", "a"],
        ["compile", "--out", str(tmp_path / "tree")],
        ["speak", "a"],
        ["verify"],
        ["serve", "--port", "0"],
    ):
        assert cli.main([words[0], "--model", str(base), "--adapter", wrong, *words[1:]]) != 0
        assert f"The adapter {wrong} can't be read" in capsys.readouterr().err


ATTENTION = r".*(?:q_proj|k_proj|o_proj|attn\.qkv|fc1)|thinker\.lm_head"
EXPERTS = r".*\.mlp\.experts\."


@pytest.mark.parametrize(
    ("targets", "settings"),
    [
        (
            ATTENTION,
            {
                "use_rslora": True,
                "rank_pattern": {"0.self_attn.q_proj": 2},
                # Of the thinker in transformers 4 alone: 5 has its layers in a language_model.
                "alpha_pattern": {"model.layers.0.self_attn.k_proj": 9, "layers.1": 2},
            },
        ),
        (ATTENTION, {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        (
            EXPERTS,
            {
                "target_modules": [],
                "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
                "use_rslora": True,
                "rank_pattern": {"language_model.layers.1.mlp.experts.down_proj": 3},
                "alpha_pattern": {"gate_up_proj": 5},
            },
        ),
        (EXPERTS, {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    ],
    ids=["patterns", "experts", "stacks", "one stack"],
)
def test_weights_are_those_that_peft_merges(base, tmp_path, targets, settings) -> None:
    """Adapters that PEFT itself makes over transformers' model, writes and merges."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from qwen3_omni_neuron.verification.oracle import Reference

    if "target_parameters" in settings and Version(transformers.__version__) < Version("5"):
        pytest.skip("4.57 has no experts as one stack")
    model = Reference(base).model
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(targets, name)
    ]
    given = {"r": RANK, "lora_alpha": 6, "target_modules": layers} | settings
    made = peft.get_peft_model(model, peft.LoraConfig(**given))
    draw_adapters(made)
    made.save_pretrained(tmp_path, save_embedding_layers=False)
    merged = peft.PeftModel.from_pretrained(Reference(base).model, tmp_path).merge_and_unload()
    assert_merged_alike(base, merged, tmp_path)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_heads_and_tables_are_those_that_peft_merges_into_the_weight_beside_them(
    base, tmp_path, targets
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from qwen3_omni_neuron.verification.oracle import Reference

    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=[*targets, "q_proj"])
    made = peft.get_peft_model(Reference(base).model.thinker, config)
    draw_adapters(made)
    for name, parameter in made.named_parameters():
        if name.endswith(("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")):
            parameter.data *= 1.5
    made.save_pretrained(tmp_path)
    merged = made.merge_and_unload()
    for name in targets:
        theirs = getattr(merged, name, None) or merged.get_input_embeddings()
        own = "thinker.lm_head.weight" if name == "lm_head" else "thinker.model.embed_tokens.weight"
        assert torch.equal(read(base, own, tmp_path), theirs.weight)


def test_several_are_those_that_peft_merges_in_order(base, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from qwen3_omni_neuron.verification.oracle import Reference

    def of(*targets: str) -> Any:
        return peft.LoraConfig(r=RANK, lora_alpha=7, target_modules=targets, use_rslora=True)

    made = peft.get_peft_model(Reference(base).model, of("q_proj", "k_proj"), adapter_name="one")
    made.add_adapter("two", of("q_proj", "gate_proj", "up_proj"))
    draw_adapters(made)
    made.save_pretrained(tmp_path, save_embedding_layers=False)
    for module in made.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("two", 0.3)
    merged = made.merge_and_unload(adapter_names=["two", "one"])
    assert_merged_alike(base, merged, (tmp_path / "two", 0.3), tmp_path / "one")


def draw_adapters(model: nn.Module) -> None:
    """Give PEFT's new parameters values, as training would."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.rand(parameter.shape, generator=draw) * 0.1


def assert_merged_alike(
    base: Path, theirs: nn.Module, *adapters: Path | tuple[Path, float]
) -> None:
    """Assert that weights with adapters are those of transformers' model, bit for bit."""
    checkpoint = Checkpoint(base, [AdapterPath.of(one) for one in adapters])
    found = set()
    with checkpoint.reader() as reader:
        for name, weight in theirs.named_parameters():
            own = re.sub(r"^thinker\.model\.language_model\.", "thinker.model.", name)
            own = re.sub(r"^thinker\.model\.(?=audio_tower|visual)", "thinker.", own)
            expected = {own: weight}
            if stack := re.fullmatch(r"(.*\.experts)\.(?:gate_(up)|down)_proj", own):
                parts = ("gate", "up") if stack[2] else ("down",)
                expected = {
                    f"{stack[1]}.{expert}.{part}_proj.weight": rows
                    for expert, matrix in enumerate(weight)
                    for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
                }
            for own, rows in expected.items():
                assert torch.equal(reader.tensor(own), rows), own
            found |= expected.keys() & checkpoint.merged_names
    assert found == checkpoint.merged_names != set()
