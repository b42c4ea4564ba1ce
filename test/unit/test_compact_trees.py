"""Trees and loads whose bfloat16 matrices are kept in 12 bits a number where that loses nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, map_tensors, write_tensors
from qwen3_omni_neuron.compilation.plan import MODELS
from qwen3_omni_neuron.cpu import precision
from qwen3_omni_neuron.cpu.weights import (
    WEIGHTS_FILE,
    compile_model,
    load_checkpoint_models,
    load_compiled_models,
)
from testing.native_library import needs_c
from testing.specs import compiled_here, plan_of
from testing.tiny import write_tiny_checkpoint

# -0, denormals, the largest number, 2^100 of both signs.
EXTREMES = (0x8000, 1, 0x807F, 0x7F7F, 0x7180, 0xF180)


def planted_in(name: str, weight: Tensor) -> Tensor:
    """Return a weight of the planted checkpoint: the first layer of the thinker is of extremes."""
    bits = weight.view(torch.int16).clone()
    match name.removeprefix("thinker.model.layers.0."):
        case "self_attn.q_proj.weight":
            bits[0, : len(EXTREMES)] = torch.tensor(EXTREMES).to(torch.int16)
        case "self_attn.k_proj.weight":
            bits[:] = 0
        case "mlp.experts.1.down_proj.weight":
            bits[:] = 0x3FC0  # 1.5: equal exponents
        case "self_attn.o_proj.weight":  # every exponent of a number, so that it stays plain
            bits[:] = torch.arange(bits.numel()).view(bits.shape).mul(157).to(torch.int16)
            bits[(bits & 0x7F80) == 0x7F80] = 0
    return bits.view(torch.bfloat16)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("planted"))
    for shard in folder.glob("*.safetensors"):
        save_file({n: planted_in(n, w) for n, w in load_file(shard).items()}, shard)
    return folder


def compile_into(tree: Path, checkpoint: Path) -> dict[str, Tensor]:
    """Compile a tree in dtype mixed, without a manifest. Return its tensors by name."""
    plan = plan_of(checkpoint, read_config(checkpoint), dtype="mixed")
    stored: dict[str, Tensor] = {}
    for model in MODELS:
        (tree / model).mkdir(parents=True)
        compile_model(plan, model, tree / model)
        stored |= map_tensors(tree / model / WEIGHTS_FILE)
    return stored


@pytest.fixture(scope="module")
def tree(planted, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    compile_into(folder, planted)
    return folder


def parameters(models: Models) -> Iterator[tuple[str, torch.dtype, bytes]]:
    """Yield name, type and bytes of each parameter."""
    for part, module in vars(models).items():
        if isinstance(module, nn.Module):
            for name, weight in module.named_parameters():
                kept = weight.detach().contiguous().view(-1).view(torch.uint8)
                yield f"{part}.{name}", weight.dtype, kept.numpy().tobytes()


def test_a_tree_has_both_forms_and_the_bits_of_the_checkpoint(planted, tree) -> None:
    stored = map_tensors(tree / "thinker" / WEIGHTS_FILE)
    layer = "thinker.decoder.layers.0."
    plain = {n for n, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert plain == {"thinker.embedding.weight", f"{layer}attention.out.weight"}
    for name in ("attention.qkv.weight", "ffn.down", "ffn.router.weight"):
        assert stored[layer + name].dtype == torch.uint8
    config = read_config(planted)
    found = load_compiled_models(tree, config, "mixed", STAGES, packed=False)
    wanted = load_checkpoint_models(Checkpoint(planted), config, "float32", STAGES, packed=False)
    pairs = zip(parameters(found), parameters(wanted), strict=True)
    assert all(one == other for one, other in pairs)


def test_a_load_from_the_checkpoint_keeps_what_the_tree_has(planted, tree) -> None:
    given = read_config(planted), "mixed", STAGES, True
    read = load_checkpoint_models(Checkpoint(planted), *given)
    mapped = load_compiled_models(tree, *given)
    pairs = zip(parameters(read), parameters(mapped), strict=True)
    assert all(one == other for one, other in pairs)
    assert {dtype for _, dtype, _ in parameters(read)} == {
        torch.uint8,
        torch.bfloat16,
        torch.float32,
    }


LAYOUT: Layout = {
    "a": ((4, 6), torch.uint8),
    "b": ((2, 5), torch.float32),
    "c": ((3,), torch.uint8),
}
PLAIN: Layout = {"a": ((10, 1, 32), torch.bfloat16), "c": ((2, 3, 32), torch.bfloat16)}


def drawn(*layouts: Layout) -> dict[str, Tensor]:
    return {
        name: torch.full(layout[name][0], 1.0 + index).to(layout[name][1])
        for index, (name, layout) in enumerate(zip("abc", layouts, strict=True))
    }


@pytest.mark.parametrize("a", [LAYOUT, PLAIN])
@pytest.mark.parametrize("c", [LAYOUT, PLAIN])
def test_a_file_says_in_which_form_each_tensor_came(tmp_path, a, c) -> None:
    tensors = drawn(a, LAYOUT, c)
    write_tensors(tmp_path / "either", LAYOUT, tensors.items(), PLAIN)
    torch.testing.assert_close(map_tensors(tmp_path / "either"), tensors, rtol=0, atol=0)
    # A tree of plain matrices has the same bytes whether it could have had others or not.
    if a is c is PLAIN:
        write_tensors(tmp_path / "plain", {**LAYOUT, **PLAIN}, tensors.items())
        assert (tmp_path / "either").read_bytes() == (tmp_path / "plain").read_bytes()


def test_an_interrupted_file_is_no_file(tmp_path) -> None:
    def cut_off() -> Iterator[tuple[str, Tensor]]:
        yield from drawn(LAYOUT, LAYOUT, LAYOUT).items()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "file", LAYOUT, cut_off(), PLAIN)
    with pytest.raises(SafetensorError):
        map_tensors(tmp_path / "file")


def test_the_manifest_of_an_earlier_version_may_say_whether_a_tree_is_compact(
    checkpoint, tmp_path
) -> None:
    words = ["compile", "--model", str(checkpoint), "--out", str(tmp_path), "--dtype", "mixed"]
    with compiled_here():
        assert cli.main(words) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["plan"]["compact"] = True
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    Qwen3Omni.load(checkpoint, compiled_path=tmp_path).close()


@needs_c
@pytest.mark.parametrize("dtype", ["mixed", "int8"])
def test_replies_over_a_tree_are_those_over_plain_weights_to_the_bit(
    checkpoint, tmp_path, monkeypatch, dtype
) -> None:
    """With a picture and sound; also over the tree of a machine without the C."""
    words = ["compile", "--model", str(checkpoint), "--dtype", dtype, "--out"]
    with compiled_here():
        assert cli.main([*words, str(tmp_path / "c")]) == 0
        with monkeypatch.context() as without_c:
            without_c.setattr(precision, "find_library", lambda: None)
            assert cli.main([*words, str(tmp_path / "torch")]) == 0
    picture = Image.fromarray(np.arange(56 * 56 * 3).astype(np.uint8).reshape(56, 56, 3))
    sound = np.sin(np.arange(16_000, dtype=np.float32))
    content = [
        {"type": "image", "image": picture},
        {"type": "audio", "audio": sound, "sampling_rate": 16_000},
    ]
    short: dict[str, Any] = {"talker_max_new_tokens": 12, "thinker_max_new_tokens": 8, "seed": 0}

    def reply(**load: Any) -> tuple[list[int], list[list[int]], bytes]:
        with Qwen3Omni.load(checkpoint, **load) as omni:
            found = omni.generate_audio([{"role": "user", "content": content}], **short)
        return list(found.token_ids), found.codes.tolist(), found.audio.tobytes()

    found = reply(compiled_path=tmp_path / "c")
    assert found == reply(dtype=dtype)
    pack = "qwen3_omni_neuron.cpu.native.binding.pack_compact_in_c"
    monkeypatch.setattr(pack, lambda *given: None)
    assert found == reply(compiled_path=tmp_path / "torch") == reply(dtype=dtype)
