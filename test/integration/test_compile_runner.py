"""The compile runner: resuming, staleness, the lock, a full disk. Over a target of nothing."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation import runner
from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    read_manifest,
    read_record,
    verify_files,
)
from qwen3_omni_neuron.compilation.plan import MODELS, CompilePlan
from qwen3_omni_neuron.compilation.runner import compile_tree, tree_lock
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.errors import ArtifactError, CompileError, OutputError
from testing.made_trees import DYING, KILLED, SLOW
from testing.repeats import RUNS_ALL
from testing.specs import plan_of

MOMENTS = 10 if RUNS_ALL else 5
PATIENCE_S = 60.0  # for a killed run's worker to notice, on a machine that does other things


@pytest.fixture(scope="module")
def plan(checkpoint) -> CompilePlan:
    return plan_of(checkpoint, read_config(checkpoint), patch_buckets=(16, 32))


@pytest.fixture(scope="module")
def clean(plan, tmp_path_factory) -> Path:
    """A tree that was compiled in one go."""
    tree = tmp_path_factory.mktemp("clean") / "tree"
    outcome = compile_tree(plan, tree, SLOW)
    assert outcome.compiled == MODELS
    assert not outcome.missing
    return tree


@pytest.fixture
def tree(clean, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(clean, tmp_path / "tree"))


def content(tree: Path) -> dict[str, object]:
    """Every file, and of those in JSON all but the times."""
    found: dict[str, object] = {}
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        raw = path.read_bytes()
        name = str(path.relative_to(tree))
        found[name] = timeless(json.loads(raw)) if path.suffix == ".json" else raw
    return found


def timeless(value: object) -> object:
    if isinstance(value, dict):
        return {name: timeless(v) for name, v in value.items() if name != "seconds"}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def start(plan: CompilePlan, tree: Path, target: str = "SLOW") -> "subprocess.Popen[bytes]":
    """A run in a process of its own, which is about to compile. target: of made_trees."""
    code = (
        # Whoever starts tests in the background has them ignore what a keyboard would send.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}\n"
        "from pathlib import Path\n"
        f"from testing.made_trees import {target}\n"
        "from qwen3_omni_neuron.compilation import runner\n"
        f"runner.WAIT_S = {PATIENCE_S}\n"
        # Not made there: what makes a plan imports torch, which takes longer than the run.
        f"import pickle; plan = pickle.loads({pickle.dumps(plan)!r})\n"
        "print(flush=True)\n"
        f"runner.compile_tree(plan, Path({str(tree)!r}), {target})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.readline()
    return process


def test_interrupted_at_any_moment_and_resumed_it_is_the_same_tree(
    plan, clean, tmp_path, monkeypatch
) -> None:
    """After each interruption a folder with a model's name is complete.

    A manifest is only there where every model is.
    """
    monkeypatch.setattr(runner, "WAIT_S", PATIENCE_S)
    expected, moments = content(clean), random.Random(5)
    tree = tmp_path / "tree"
    cut, longest_s = 0, 1.2
    statuses: list[int] = []
    while cut < MOMENTS:
        if (tree / MANIFEST_FILE).exists():  # something to interrupt
            shutil.rmtree(tree / moments.choice(MODELS), ignore_errors=True)
            shutil.rmtree(tree / "audio", ignore_errors=True)
        process = start(plan, tree)
        time.sleep(moments.uniform(0.0, longest_s))
        process.send_signal(signal.SIGKILL if cut % 2 else signal.SIGINT)
        status = process.wait()
        if status == 0:
            longest_s *= 0.8  # over before it was interrupted: sooner, on this machine
        else:
            cut += 1
            statuses.append(status)
        models = [tree / model for model in MODELS if (tree / model).exists()]
        for folder in models:
            assert content(folder) == content(clean / folder.name), cut
        if (tree / MANIFEST_FILE).exists() and len(models) == len(MODELS):
            verify_files(tree, read_manifest(tree))
    by_signal = [status for status in statuses if status in (-signal.SIGINT, -signal.SIGKILL)]
    assert len(by_signal) > MOMENTS // 2, f"runs ended by themselves: {statuses}"
    kept = [model for model in MODELS if (tree / model).exists()]
    assert set(compile_tree(plan, tree, SLOW).compiled) == set(MODELS) - set(kept)
    assert content(tree) == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_what_an_interrupted_run_was_compiling_ends_with_it_and_the_folder_is_free(
    plan, clean, tmp_path, how
) -> None:
    """The compiler, too, which is a program of its own."""
    process = start(plan, tmp_path, "LONG")
    begun = tmp_path / ".thinker.part" / "begun"
    while not (begun.exists() and begun.read_text()):
        assert process.poll() is None, "it ended before it began to compile"
        time.sleep(0.01)
    compiler = int(begun.read_text())
    process.send_signal(how)
    process.wait()
    until_s = time.monotonic() + PATIENCE_S
    while runs(compiler):
        assert time.monotonic() < until_s, "the compiler goes on"
        time.sleep(0.01)
    assert compile_tree(plan, tmp_path, SLOW).compiled == MODELS
    assert content(tmp_path) == content(clean)


def runs(pid: int) -> bool:
    """Tell whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_runs_on_one_folder_refuse_each_other(plan, tree) -> None:
    before = content(tree)
    with (
        tree_lock(tree),
        pytest.raises(CompileError, match=rf"process {os.getpid()}\) is writing into {tree}"),
    ):
        compile_tree(replace(plan, dtype="float32"), tree, SLOW)
    assert content(tree) == before


def test_another_plan_recompiles_the_models_it_changes(plan, tree) -> None:
    changes: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"context_length": 32}, ("thinker", "talker")),
        ({"patch_buckets": (64,)}, ("vision",)),
        ({"chunk_frames": (1, 25)}, ("code2wav",)),
        ({"max_concurrency": 2}, ("thinker", "talker", "code_predictor", "code2wav")),
        ({"dtype": "float32"}, MODELS),
    ]
    for change, stale in changes:
        plan = replace(plan, **change)
        assert compile_tree(plan, tree, SLOW).compiled == stale, change
        manifest = read_manifest(tree)
        assert manifest.plan == plan.settings
        verify_files(tree, manifest)


def test_a_new_model_is_kept_where_the_old_one_can_not_be_deleted(plan, tree, monkeypatch) -> None:
    plan = replace(plan, patch_buckets=(64,))

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(OutputError):
            compile_tree(plan, tree, SLOW)
    assert compile_tree(plan, tree, SLOW).compiled == ()


def test_another_checkpoint_recompiles_everything(plan, tree, tmp_path) -> None:
    model = Path(shutil.copytree(plan.model, tmp_path / "copy"))
    assert compile_tree(replace(plan, model=model), tree, SLOW).compiled == ()
    shard = model / "model-00002-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])["thinker.lm_head.weight"]["data_offsets"]
    raw[8 + length + (begin + end) // 2] ^= 1
    shard.write_bytes(raw)
    assert compile_tree(replace(plan, model=model), tree, SLOW).compiled == MODELS


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


RECORD = Path("audio", "record.json")
HARMS: list[Callable[[Path], object]] = [
    lambda tree: edit(
        tree / RECORD, f'"qwen3-omni-neuron": "{PACKAGE_VERSION}"', '"qwen3-omni-neuron": "0"'
    ),
    lambda tree: edit(tree / RECORD, '"target": "cpu"', '"target": "neuron"'),
    lambda tree: (tree / "audio" / "deep" / "1.bin").unlink(),
    lambda tree: os.truncate(tree / "audio" / "deep" / "1.bin", 5),
    lambda tree: (tree / RECORD).write_text("{"),
    lambda tree: (tree / RECORD).write_text("[]"),
    lambda tree: shutil.rmtree(tree / "audio"),
    lambda tree: (tree / MANIFEST_FILE).unlink(),
]


def test_a_model_that_does_not_fit_is_the_only_one_compiled(plan, clean, tree) -> None:
    for harm in HARMS:
        harm(tree)
        lost = not (tree / MANIFEST_FILE).exists()
        assert compile_tree(plan, tree, SLOW).compiled == (() if lost else ("audio",))
        assert content(tree) == content(clean)


def test_a_folder_of_somebody_else_is_not_replaced(plan, tmp_path) -> None:
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "song.wav").write_bytes(b"la")
    with pytest.raises(ArtifactError, match="audio exists, but is not a compiled model"):
        compile_tree(plan, tmp_path, SLOW)
    assert (tmp_path / "audio" / "song.wav").read_bytes() == b"la"


def test_a_compiler_that_crashes_is_quoted_and_the_rest_is_kept(plan, clean, tmp_path) -> None:
    with pytest.raises(CompileError, match=r"(?s)vision: .* SIGABRT.*the wheels came off"):
        compile_tree(plan, tmp_path, DYING)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "thinker"]
    assert compile_tree(plan, tmp_path, SLOW).compiled == MODELS[1:]
    assert content(tmp_path) == content(clean)


@pytest.mark.parametrize("opt_level", [2, 1, None])
def test_a_compile_that_is_killed_says_what_takes_less_memory_and_keeps_what_is_done(
    plan, tmp_path, opt_level
) -> None:
    plan = replace(plan, opt_level=opt_level)
    with pytest.raises(CompileError, match=r"vision: .*SIGKILL") as caught:
        compile_tree(plan, tmp_path, KILLED)
    assert ("Try --opt-level 1, which" in str(caught.value)) == (opt_level == 2)
    assert compile_tree(plan, tmp_path, SLOW).compiled == MODELS[1:]
    assert compile_tree(replace(plan, opt_level=3), tmp_path, SLOW).compiled == MODELS
    assert read_manifest(tmp_path).plan["opt_level"] == 3


def test_a_disk_that_is_really_full(plan, clean, small_disk, monkeypatch) -> None:
    with pytest.raises(OutputError, match=r"writes 0\.4 MB, .* nothing was written"):
        compile_tree(plan, small_disk, SLOW)
    assert [path.name for path in small_disk.iterdir()] == [".lock"]
    monkeypatch.setattr(runner, "_check_disk", lambda *_: None)  # others write there meanwhile
    with pytest.raises(OutputError, match="no space is left on the disk"):
        compile_tree(plan, small_disk, SLOW)
    there = sorted(p.name for p in small_disk.iterdir() if p.name != ".lock")
    assert 0 < len(there) < len(MODELS)
    for model in there:
        assert read_record(small_disk / model)[1].files
        assert content(small_disk / model) == content(clean / model)
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert len(compile_tree(plan, small_disk, SLOW).compiled) == len(MODELS) - len(there)
    assert content(small_disk) == content(clean)
