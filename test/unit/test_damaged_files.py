"""Files of a model that are damaged, or were written to do harm, end in an error of the package."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, fingerprint
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names
from qwen3_omni_neuron.compilation.manifest import Manifest, write_manifest
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.target import CPU, LIMITS
from qwen3_omni_neuron.cpu.weights import compile_model
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.untrusted_files import MOST_DEPTH, MOST_VALUES, parse_json
from testing.imports import ROOT
from testing.peak_memory import needs_proc
from testing.repeats import again

COUNT = 10_000
SHORT = 60  # in CI
PORTIONS = 20


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tree that was compiled from it."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("whole") / "checkpoint"))
    tree = folder / "compiled"
    plan, models = make_plan(folder, read_config(folder), LIMITS, max_concurrency=1), {}
    for model in MODELS:
        (tree / model).mkdir(parents=True)
        models[model] = compile_model(plan, model, tree / model)
    write_manifest(tree, Manifest(fingerprint(folder), plan.settings, CPU.versions(), models))
    return folder


@needs_proc
@pytest.mark.parametrize(
    "seeds",
    [
        range(SHORT),
        *(
            again(range(start, start + COUNT // PORTIONS))
            for start in range(SHORT, COUNT, COUNT // PORTIONS)
        ),
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_a_damaged_file_ends_in_an_error_of_ours_or_loads(
    whole: Path, tmp_path: Path, seeds: Sequence[int]
) -> None:
    command = [sys.executable, "-m", "testing.damaged_files", str(whole)]
    command += [str(seeds[0]), str(seeds[-1] + 1), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    ends: list[tuple[int, str, str]] = json.loads(run.stdout)
    assert [seed for seed, _, _ in ends] == [*seeds]
    failed = [f"{seed} {name}: {end}" for seed, name, end in ends if end.startswith("failed")]
    assert not failed, "\n".join(failed)
    kinds = {end.partition(":")[0] for _, _, end in ends}
    assert kinds >= {"loaded", "CheckpointError", "ArtifactError", "StoredSessionError"}


def edited(folder: Path, into: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a checkpoint, with a change of a file of JSON. Returns the copy."""
    copy = Path(shutil.copytree(folder, into / "copy"))
    document = json.loads((copy / name).read_text())
    change(document)
    (copy / name).write_text(json.dumps(document).replace('"1e400"', "1e400"))
    return copy


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("thinker_config.text_config", "num_hidden_layers", 10**9, "from 1 to 256"),
        ("thinker_config.text_config", "vocab_size", 2**40, "from 1 to 2097152"),
        ("thinker_config.text_config", "num_attention_heads", 0, "from 1 to 1024"),
        ("thinker_config.text_config", "num_attention_heads", 3, "multiple of num_key_value"),
        ("thinker_config.text_config", "num_experts", 1024, None),
        ("thinker_config.text_config", "rope_theta", "1e400", "number 1e400, which is too large"),
        ("thinker_config.text_config", "rope_scaling", 3, "rope_scaling is not an object"),
        ("thinker_config.audio_config", "n_window_infer", 801, "multiple of twice n_window"),
        ("talker_config.text_config", "hidden_size", True, "from 1 to 131072"),
        ("talker_config", "thinker_hidden_size", 65, "they must be equal"),
        ("code2wav_config", "upsample_rates", [64] * 8, "65536 samples a frame"),
    ],
)
def test_a_number_of_a_config_is_refused_by_its_name(
    checkpoint: Path, tmp_path: Path, section: str, field: str, value: Any, message: str | None
) -> None:
    def change(document: dict[str, Any]) -> None:
        owner = reduce(lambda inner, name: inner[name], section.split("."), document)
        owner[field] = value

    copy = edited(checkpoint, tmp_path, "config.json", change)
    if message is None:  # a possible size: what is stored differs
        parts = lay_out(read_config(copy), ("thinker",))[1]
        with pytest.raises(CheckpointError, match="lacks 9144 parameters"):
            check_names([*parts.values()], Checkpoint(copy))
        return
    with pytest.raises(CheckpointError, match=rf"config.json.*{message}") as refused:
        read_config(copy)
    assert field in str(refused.value) or value == "1e400"


@pytest.mark.parametrize("file", ["../config.json", "..", "a/b", "", "a\nb", 7, None, ["x"]])
def test_a_shard_is_a_file_of_its_folder(checkpoint: Path, tmp_path: Path, file: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        document["weight_map"]["thinker.lm_head.weight"] = file

    copy = edited(checkpoint, tmp_path, "model.safetensors.index.json", change)
    for read in (Checkpoint, fingerprint):
        with pytest.raises(CheckpointError, match="its weight_map has"):
            read(copy)


@pytest.mark.parametrize("depth", [64, 65])
def test_depth_is_bounded(depth: int) -> None:
    text = b'{"[{[":' * (depth - 1) + b"[]" + b"}" * (depth - 1)
    if depth == MOST_DEPTH:
        assert parse_json(text)
        return
    with pytest.raises(ValueError, match="more than 64 lists and objects in each other"):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1e999}', "number 1e999, which is too large"),
        (b'{"a":NaN}', "number NaN"),
        (b'{"b":1,"a":1,"a":2}', "it has a twice in one object"),
        (b"[" + b"0," * MOST_VALUES + b"0]", "values, and 1048576 is the most"),
        (b"\xff", "can't decode"),
        (b'["', "some without an end"),
        (b'{"[": "\\"[", "a"}', "not JSON"),
    ],
)
def test_what_readers_take_differently_is_no_json(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    ("field", "value"), [("feature_size", 80), ("patch_size", 14), ("merge_size", 4)]
)
def test_a_preprocessor_of_another_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, field: str, value: int
) -> None:
    name = "preprocessor_config.json"
    copy = edited(checkpoint, tmp_path, name, lambda document: document.update({field: value}))
    with pytest.raises(CheckpointError, match=f"{field}.*They belong to different checkpoints"):
        PromptBuilder(copy, read_config(copy))
