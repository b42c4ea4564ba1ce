"""Find and read a checkpoint: errors name whatever is missing or broken."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint, resolve_checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.precision import PRECISIONS
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import compile_model, load_checkpoint_models
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import OmniConfig
from testing.models import load_models
from testing.peak_memory import needs_proc
from testing.repeats import again
from testing.subprocesses import run_python
from testing.tiny import write_tiny_checkpoint

SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def load(folder: Path, config: OmniConfig) -> Models:
    return load_models(Checkpoint(folder), config, torch.float32)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for shard in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def test_a_single_file_checkpoint_loads_alike(copy, config, models) -> None:
    tensors = all_tensors(copy)
    for file in [*copy.glob("*.safetensors"), copy / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, copy / "model.safetensors")
    single = load(copy, config)
    for ours, theirs in (
        (single.thinker, models.thinker),
        (single.talker, models.talker),
        (single.code2wav, models.code2wav),
    ):
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_shards_are_read_alike_however_many_are_open(copy, monkeypatch) -> None:
    files = Checkpoint(copy)
    with files.reader() as reader:
        together = {name: reader.tensor(name) for name in files.names}
    monkeypatch.setattr("qwen3_omni_neuron.checkpoint.files.OPEN_BYTES", 0)
    with files.reader() as reader:
        for name in reversed(together):
            assert torch.equal(reader.tensor(name), together[name])


def test_a_missing_shard_is_named(copy) -> None:
    (copy / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of its 4 shards: {SHARD}"):
        Checkpoint(copy)


def test_a_truncated_shard_is_named(copy, config) -> None:
    content = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{SHARD} can't be read.*truncated"):
        load(copy, config)


def test_a_truncated_or_missing_single_file_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(CheckpointError, match="truncated or broken"):
        Checkpoint(tmp_path)


def rename(folder: Path, old: str, new: str) -> None:
    """Rename a tensor in its shard and in the index."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = index["weight_map"].pop(old)
    index["weight_map"][new] = shard
    index_path.write_text(json.dumps(index))
    tensors = load_file(folder / shard)
    tensors[new] = tensors.pop(old)
    save_file(tensors, folder / shard)


def test_missing_and_unexpected_names_are_listed(copy, config) -> None:
    old, new = "talker.codec_head.weight", "talker.codec_head.wait"
    rename(copy, old, new)
    with pytest.raises(CheckpointError) as caught:
        load(copy, config)
    assert f"lacks 1 parameters: {old}" in str(caught.value)
    assert f"has unknown 1 parameters: {new}" in str(caught.value)


def test_a_tensor_of_another_shape_is_named(copy, config) -> None:
    name = "thinker.model.norm.weight"
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    shard = copy / index["weight_map"][name]
    tensors = load_file(shard)
    tensors[name] = torch.ones(63)
    save_file(tensors, shard)
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \[63\]; config.json requires \[64\]"
    ):
        load(copy, config)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_number_that_is_not_finite_is_named(copy, config, tmp_path, dtype, value) -> None:
    for shard in sorted(copy.glob("*.safetensors")):
        tensors = load_file(shard)
        name = max(tensors, key=lambda name: (tensors[name].ndim, name))
        small = min(tensors, key=lambda name: (tensors[name].ndim, name))
        for chosen in (name, small):
            kept = tensors[chosen].clone()
            tensors[chosen].view(-1)[-2] = value
            save_file(tensors, shard)
            said = rf"{re.escape(chosen)} is NaN or infinite in 1 of {kept.numel()} numbers"
            with pytest.raises(CheckpointError, match=said):
                load_checkpoint_models(Checkpoint(copy), config, dtype, STAGES, packed=True)
            with pytest.raises(CheckpointError, match=said):
                for model in MODELS:
                    compile_model(
                        make_plan(copy, config, LIMITS, dtype=dtype),
                        model,
                        Path(tempfile.mkdtemp(dir=tmp_path)),
                    )
            tensors[chosen] = kept
        save_file(tensors, shard)


def test_what_is_neither_folder_nor_hub_id_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_checkpoint("/nowhere/at/all")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(file)


def test_a_hub_id_is_taken_from_the_cache_offline(checkpoint, tmp_path, monkeypatch) -> None:
    commit = "0" * 40
    cached = tmp_path / "models--someone--omni"
    shutil.copytree(checkpoint, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    script = (
        "from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint\n"
        "from qwen3_omni_neuron.errors import CheckpointError\n"
        "print(resolve_checkpoint('someone/omni'))\n"
        "try: resolve_checkpoint('someone/else')\n"
        "except CheckpointError as error: print(error)\n"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first, second = run_python("-c", script).strip().split("\n", 1)
    assert Path(first) == cached / "snapshots" / commit
    assert "someone/else is not a local folder" in second
    assert "pass its folder" in second


PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from testing.models import load_models
from testing.peak_memory import watched

folder, dtype, tiny = Path(sys.argv[1]), getattr(torch, sys.argv[2]), Path(sys.argv[3])
load_models(Checkpoint(tiny), read_config(tiny), dtype)  # what the libraries themselves take
config = read_config(folder)

with watched() as peak:
    models = load_models(Checkpoint(folder), config, dtype)
modules = [m for m in vars(models).values() if m is not None]
parameters = {p.data_ptr(): p.nbytes for m in modules for p in m.parameters()}
print(peak.nbytes / sum(parameters.values()))
"""


@needs_proc
@pytest.mark.parametrize("dtype", [again("bfloat16"), "float32"])
def test_loading_peaks_below_1_3_times_the_weights(small_checkpoint, checkpoint, dtype) -> None:
    ratio = run_python("-c", PEAK_SCRIPT, small_checkpoint, dtype, checkpoint)
    assert float(ratio) < 1.3


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory) -> Path:
    """Return a checkpoint large enough for its memory to be measured."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("small"), size="small")
