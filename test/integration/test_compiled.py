"""Replies from a compiled tree, what is refused when one is loaded, and the commands around it."""

import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron import Qwen3Omni, SpeechResult, cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, lay_out
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODELS, SAME
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.cpu import precision
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models, load_compiled_models
from qwen3_omni_neuron.errors import ArtifactError, OptionError
from testing.media_cases import IMAGE, audio, text, user
from testing.peak_memory import needs_proc
from testing.replies import GREEDY, assert_alike
from testing.specs import compiled_here
from testing.subprocesses import run_python
from testing.tiny import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]
MAPS = Path("/proc/self/maps")
MESSAGES = [user(text("See"), IMAGE, audio(1.2), text("and tell."))]
# Chunks of fixed sizes: the adaptive ones follow the time.
SHORT = {
    **GREEDY,
    "thinker_max_new_tokens": 12,
    "talker_max_new_tokens": 12,
    "chunk_frames": [1, 2, 4],
}
SETTINGS = ["--dtype", "float32", "--max-concurrency", "2", "--context-length", "256"]
BUCKETS = ["--patch-buckets", "64,128", "--chunk-frames", "1,2,4"]


@pytest.fixture(scope="module")
def tree(checkpoint, tmp_path_factory) -> Path:
    """With buckets of every kind."""
    folder = tmp_path_factory.mktemp("compiled") / "tree"
    with compiled_here():
        assert cli.main(compile_words(checkpoint, folder, *SETTINGS, *BUCKETS)) == 0
    return folder


@pytest.fixture
def copy(tree, tmp_path) -> Path:
    return Path(shutil.copytree(tree, tmp_path / "tree"))


@pytest.fixture(scope="module")
def expected(checkpoint) -> SpeechResult:
    """Replies of the checkpoint loaded directly, with nothing padded."""
    load = {"dtype": "float32", "max_concurrency": 2, "context_length": 256}
    with Qwen3Omni.load(checkpoint, **load) as omni:
        reply = omni.generate_audio(MESSAGES, **SHORT)
    assert len(reply.codes) > 5
    return reply


def compile_words(checkpoint: Path, folder: Path, *more: str) -> list[str]:
    return ["compile", "--model", str(checkpoint), "--out", str(folder), *more]


@pytest.mark.parametrize("placement", ["shared", "split"])
def test_a_compiled_tree_says_what_its_checkpoint_says(
    checkpoint, tree, expected, placement
) -> None:
    with Qwen3Omni.load(checkpoint, compiled_path=tree, placement=placement) as omni:
        assert_alike(omni.generate_audio(MESSAGES, **SHORT), expected)


DTYPES = ("mixed", "float32", "int8", "int4", "bfloat16", "float64")


@pytest.fixture(scope="module")
def tree_of(checkpoint, tmp_path_factory) -> Callable[[str], Path]:
    """A tree of each dtype, compiled when it is first asked for."""
    made: dict[str, Path] = {}

    def make(dtype: str) -> Path:
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype) / "tree"
            words = ["--dtype", dtype, "--max-concurrency", "1", "--chunk-frames", "4"]
            with compiled_here():
                assert cli.main(compile_words(checkpoint, made[dtype], *words)) == 0
        return made[dtype]

    return make


def mapped_ranges(file: Path) -> list[tuple[int, int]]:
    """The addresses at which this process has mapped a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    pairs = (line.split()[0].split("-") for line in lines if line.endswith(str(file.resolve())))
    return [(int(start, 16), int(end, 16)) for start, end in pairs]


@pytest.mark.parametrize("packed", [True, False], ids=["for the C", "for torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.diagonal
def test_the_weights_are_the_checkpoints_converted(
    checkpoint, tree_of, config, dtype, packed
) -> None:
    """In memory and on the disk, where safetensors' own reader finds them; mapped, not copied."""
    tree = tree_of(dtype)
    given = config, dtype, STAGES, packed
    numbers: dict[str, Any] = {"predictor_dtype": LIMITS.predictor_dtypes.get(dtype, (SAME,))[0]}
    loaded = load_checkpoint_models(Checkpoint(checkpoint), *given, **numbers)
    compiled = load_compiled_models(tree, *given, **numbers)
    uncopied = packed or dtype in ("bfloat16", "float64")
    files = [tree / model / "weights.safetensors" for model in MODELS] if MAPS.exists() else []
    ranges = [pair for file in files for pair in mapped_ranges(file)]
    for parts in MODEL_PARTS.values():
        for name in parts:
            ours, theirs = (vars(models)[name] for models in (compiled, loaded))
            expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
            found = dict(ours.named_parameters()) | dict(ours.named_buffers())
            assert found.keys() == expected.keys()
            for parameter, tensor in ours.named_parameters():
                assert torch.equal(tensor, expected[parameter]), f"{name}.{parameter}"
                assert tensor.dtype == expected[parameter].dtype
                if files and uncopied:
                    address = tensor.data_ptr()
                    assert any(a <= address < b for a, b in ranges), f"{name}.{parameter}"
    stored = load_file(tree / "code_predictor" / "weights.safetensors")
    if uncopied:
        assert torch.equal(stored["code_predictor.head"], compiled.code_predictor.head)


@pytest.mark.parametrize("dtype", ["mixed", "int8", "int4", "float32"])
def test_a_tree_speaks_where_there_is_no_library(
    checkpoint, tree_of, monkeypatch, caplog, dtype
) -> None:
    tree = tree_of(dtype)
    with Qwen3Omni.load(checkpoint, compiled_path=tree) as omni:
        expected = omni.generate_audio(MESSAGES, **{**SHORT, "chunk_frames": [4]})
    monkeypatch.setattr(precision, "find_library", lambda: None)
    with Qwen3Omni.load(checkpoint, compiled_path=tree) as omni:
        found = omni.generate_audio(MESSAGES, **{**SHORT, "chunk_frames": [4]})
    if (
        dtype == "int4"
    ):  # torch may round an input to the next integer, and a later token hangs on it
        assert found.token_ids[:8] == expected.token_ids[:8]
    else:
        assert_alike(found, expected)
    files = sum(file.stat().st_size for file in tree.rglob("weights.safetensors")) / 1e9
    _, parts = lay_out(read_config(checkpoint), STAGES)
    wide = sum(4 * p.numel() for part in parts.values() for p in part.module.parameters()) / 1e9
    said = [float(size) for size in re.findall(r"([\d.e-]+) GB of", caplog.text)]
    if dtype == "float32":
        assert not said
    else:
        assert said == [pytest.approx(files, rel=0.05), pytest.approx(wide, rel=1e-2)]


def test_a_text_only_checkpoint_is_compiled_and_writes(checkpoint, tmp_path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "text-only"))
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "enable_audio_output": False}))
    with compiled_here():
        assert cli.main(compile_words(model, tmp_path / "tree", "--max-concurrency", "1")) == 0
    with Qwen3Omni.load(model, compiled_path=tmp_path / "tree") as omni:
        result = omni.generate_text(MESSAGES, thinker_max_new_tokens=3, thinker_do_sample=False)
    assert len(result.token_ids) == 3


def test_an_argument_that_contradicts_the_tree_is_refused_by_name(checkpoint, tree) -> None:
    given: dict[str, tuple[Any, Any]] = {
        "dtype": ("bfloat16", "float32"),
        "max_concurrency": (8, 2),
        "context_length": (512, 256),
        "target": ("neuron", "cpu"),
    }
    for name, (ours, theirs) in given.items():
        said = f"{name} is {ours!r}, but .* was compiled with {theirs!r}"
        with pytest.raises(OptionError, match=said):
            Qwen3Omni.load(checkpoint, compiled_path=tree, **{name: ours})


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def harm(tree: Path) -> None:
        raw = json.loads((tree / "manifest.json").read_text())
        change(raw)
        (tree / "manifest.json").write_text(json.dumps(raw))

    return harm


WEIGHTS = Path("code2wav", "weights.safetensors")
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda t: (t / "manifest.json").unlink(), "not a complete compiled tree"),
    "half a manifest": (lambda t: os.truncate(t / "manifest.json", 99), "manifest.json can't be"),
    "schema": (edit_manifest(lambda m: m.update(schema=99)), "is of schema 99, this version reads"),
    "no models": (edit_manifest(lambda m: m.pop("graphs")), "is not a manifest"),
    "a model": (edit_manifest(lambda m: m["graphs"].pop("talker")), "lacks talker. Compile again"),
    "tp": (edit_manifest(lambda m: m["plan"].update(tp=8)), "tp must be 1 for target cpu, got 8"),
    "target": (
        edit_manifest(lambda m: m["plan"].update(target="gpu")),
        "was compiled for target 'gpu', and this version supports cpu, neuron",
    ),
    "version": (
        edit_manifest(lambda m: m["versions"].update({"qwen3-omni-neuron": "0.0.9"})),
        f"compiled with qwen3-omni-neuron 0.0.9, but this machine has {PACKAGE_VERSION}. "
        "Compile again: qwen3-omni-neuron compile --model .* --patch-buckets 64,128",
    ),
    "a file": (lambda t: (t / WEIGHTS).unlink(), f"{WEIGHTS} is missing.*Compile again"),
    "its end": (lambda t: os.truncate(t / WEIGHTS, 999), f"{WEIGHTS} has 999 bytes instead of"),
}


def test_a_tree_that_does_not_fit_is_not_loaded(checkpoint, tree, tmp_path, monkeypatch) -> None:
    """Without a download, but where a config says what the tree should have."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for name, (harm, said) in HARMS.items():
        copy = Path(shutil.copytree(tree, tmp_path / name))
        harm(copy)
        for model in (checkpoint, *["Qwen/Qwen3-Omni"] * (name not in ("a model", "tp"))):
            with pytest.raises(ArtifactError, match=said):
                Qwen3Omni.load(model, compiled_path=copy)


def test_a_tree_of_another_checkpoint_is_not_loaded(tree, tmp_path) -> None:
    """One with the same config and the same shapes, as a fine-tune has."""
    other = write_tiny_checkpoint(tmp_path, seed=99)
    with pytest.raises(
        ArtifactError, match="compiled from another checkpoint or with other adapters than"
    ):
        Qwen3Omni.load(other, compiled_path=tree)


def test_a_file_of_the_right_size_with_other_tensors_is_named(checkpoint, copy, config) -> None:
    raw = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(raw.replace(b"code2wav.norm.weight", b"code2wav.nurm.weight"))
    with pytest.raises(ArtifactError, match=r"2 differ|1 differ"):
        Qwen3Omni.load(checkpoint, compiled_path=copy)
    (copy / WEIGHTS).write_bytes(bytes(len(raw)))
    with pytest.raises(ArtifactError, match=r"weights.safetensors can't be read"):
        Qwen3Omni.load(checkpoint, compiled_path=copy)
    with pytest.raises(ArtifactError, match=r"float32 .* instead of torch.float64"):
        load_compiled_models(copy, config, "float64", ("thinker",), packed=True)
    with pytest.raises(ArtifactError, match=r"float32 .* instead of torch.bfloat16"):
        load_compiled_models(copy, config, "mixed", ("talker",), packed=True)
    with pytest.raises(ArtifactError, match=r"differ, thinker.*_scale first"):
        load_compiled_models(copy, config, "int8", ("thinker",), packed=True)


# Memory: compile the largest model, and watch.
PEAK_SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation.plan import models_of
from qwen3_omni_neuron.cpu.weights import compile_model, expected_bytes
from testing.peak_memory import watched
from testing.specs import plan_of

small, tiny, out = map(Path, sys.argv[1:])
config = read_config(small)
plan = plan_of(small, config, dtype="float32")
(out / "warm").mkdir()  # what the libraries themselves take
compile_model(replace(plan, model=tiny), "thinker", out / "warm")

with watched() as peak:
    model = max(models_of(config), key=lambda model: expected_bytes(plan, model))
    (out / model).mkdir()
    record = compile_model(plan, model, out / model)
print(peak.nbytes / record.bytes)
"""


@needs_proc
def test_compiling_peaks_below_half_of_the_largest_model(checkpoint, tmp_path) -> None:
    """Far below the 1.5 that was asked for: a parameter at a time, and its packed form."""
    small = write_tiny_checkpoint(tmp_path / "small", size="small")
    assert float(run_python("-c", PEAK_SCRIPT, small, checkpoint, tmp_path)) < 0.5


def test_a_script_compiles_its_model(checkpoint, tmp_path, capsys, monkeypatch) -> None:
    script = str(ROOT / "compile" / "audio.py")
    words = [*compile_words(checkpoint, tmp_path)[1:], "--target", "cpu", "--tp", "1"]
    monkeypatch.setattr(sys, "argv", [script, *words])
    with compiled_here(), pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert not ended.value.code
    assert "is incomplete (thinker: missing; vision: missing; talker: m" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "audio"]


def test_inspect_prints_the_plan_and_verifies(copy, capsys) -> None:
    assert cli.main(["inspect", str(copy), "--verify"]) == 0
    printed = capsys.readouterr().out
    for line in ("target: cpu", "patch_buckets: 64,128", "verified: 6 files"):
        assert line in printed
    raw = bytearray((copy / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (copy / WEIGHTS).write_bytes(raw)
    assert cli.main(["inspect", str(copy)]) == 0
    assert cli.main(["inspect", str(copy), "--verify"]) == 1
    assert f"{copy / WEIGHTS} has changed: its sha256 is" in capsys.readouterr().err
    os.truncate(copy / WEIGHTS, 10)
    assert cli.main(["inspect", str(copy)]) == 1
    assert f"{copy / WEIGHTS} has 10 bytes instead of" in capsys.readouterr().err
