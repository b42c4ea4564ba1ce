"""The compile run: compiles a tree's missing or stale models one by one.

Only one run at a time, which holds the tree's lock, writes into a tree.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, fingerprint
from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    RECORD_FILE,
    Manifest,
    ModelRecord,
    Origin,
    file_problem,
    read_record,
    sync_folder,
    write_manifest,
    write_record,
)
from qwen3_omni_neuron.compilation.plan import MODELS, CompilePlan, models_of
from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.compilation.versions import installed_versions
from qwen3_omni_neuron.compilation.worker import is_full, run_worker
from qwen3_omni_neuron.errors import ArtifactError, CompileError, OptionError, OutputError

LOCK_FILE = ".lock"
# A killed run's worker holds the lock until it notices its parent's end: 0.25 s, or longer if an
# import blocks its watching thread.
WAIT_S = 3.0
_RETRY_S = 0.05


@contextmanager
def tree_lock(tree: Path) -> Iterator[int]:
    """Hold the tree's lock. Yields its descriptor; a process that inherits it also holds it.

    Raises CompileError if another run holds it for WAIT_S, OSError.
    """
    descriptor = os.open(tree / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, tree)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, tree: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode().strip()
                raise CompileError(
                    f"another run{f' (process {holder})' if holder else ''} is writing into "
                    f"{tree}. Wait until it ends, or use another folder."
                ) from None
            time.sleep(_RETRY_S)


MB = 1e6


class Progress:
    """Receiver of a run's progress; this one ignores it. Bytes: size of a model's folder."""

    def begins(self, expected_bytes: Mapping[str, int], reasons: Mapping[str, str]) -> None:
        """Receive the models to compile: expected sizes and reasons."""

    def advances(self, model: str, written_bytes: int) -> None:
        """Receive the bytes written, a few times per second."""

    def compiled(self, model: str, record: ModelRecord) -> None:
        """Receive a finished model's record."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    records: models that fit the plan, in its order. compiled: this run's. missing: other models,
    with reasons; if empty, the tree has its manifest.
    """

    records: Mapping[str, ModelRecord]
    compiled: tuple[str, ...]
    missing: Mapping[str, str]


def compile_tree(
    plan: CompilePlan,
    tree: Path,
    target: Target,
    only: Collection[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Compile the models of a plan that the tree lacks or that are stale.

    Each compiles in its own process into a temporary folder, renamed when complete; the manifest is
    removed before the first model changes, and written when all fit the plan. So a new run resumes
    an interrupted one. only: models to compile; empty: all. Raises OptionError for an unknown
    model, CheckpointError, ArtifactError if the folder has something else under a model's name,
    CompileError, OutputError if the tree can't be written.
    """
    models = models_of(read_config(plan.model))
    if unknown := [name for name in only if name not in models]:
        raise OptionError(f"unknown model {unknown[0]!r}. This checkpoint has {', '.join(models)}.")
    try:
        tree.mkdir(parents=True, exist_ok=True)
        with tree_lock(tree) as lock:
            _sweep(tree)
            return _compile(plan, tree, target, models, only, progress or Progress(), lock)
    except OutputError:
        raise
    except OSError as error:
        raise _output_error(tree, error) from error


def _compile(
    plan: CompilePlan,
    tree: Path,
    target: Target,
    models: tuple[str, ...],
    only: Collection[str],
    progress: Progress,
    lock: int,
) -> Outcome:
    merged = Checkpoint(plan.model, plan.adapters).merged if plan.adapters else ()
    checkpoint, versions = fingerprint(plan.model, plan.adapters), target.versions()
    origins = {m: Origin(checkpoint, plan.model_settings(m), versions) for m in models}
    records: dict[str, ModelRecord] = {}
    missing: dict[str, str] = {}
    for model, origin in origins.items():
        reason, record = _inspect(tree / model, origin)
        if record is None:
            missing[model] = reason
        else:
            records[model] = record
    chosen = [model for model in missing if not only or model in only]
    expected = {model: target.expected_bytes(plan, model) for model in chosen}
    _check_disk(tree, sum(expected.values()))
    progress.begins(expected, {model: missing[model] for model in chosen})
    for model in chosen:
        part = tree / f".{model}.part"
        try:
            part.mkdir()

            def tick(model: str = model, part: Path = part) -> None:
                progress.advances(model, _folder_bytes(part))

            record = run_worker(target.compile_model, plan, model, part, lock, tick)
            write_record(part, origins[model], record)
            _replace(tree, model, part)
        except BaseException as error:
            if target.keeps_failed and isinstance(error, CompileError):
                part.rename(tree / f".{model}.failed")
            shutil.rmtree(part, ignore_errors=True)
            raise
        records[model] = record
        del missing[model]
        progress.compiled(model, record)
    ordered = {model: records[model] for model in models if model in records}
    if not missing:
        for model in set(MODELS) - set(models):  # an earlier checkpoint's, which had a talker
            if (tree / model / RECORD_FILE).exists():
                _replace(tree, model, None)
        present = installed_versions() | versions
        write_manifest(tree, Manifest(checkpoint, plan.settings, present, ordered, merged))
    return Outcome(ordered, tuple(chosen), missing)


def _inspect(folder: Path, wanted: Origin) -> tuple[str, ModelRecord | None]:
    if not folder.exists():
        return "missing", None
    if not (folder / RECORD_FILE).exists():
        raise ArtifactError(
            f"{folder} exists, but is not a compiled model: it has no {RECORD_FILE}. Compile into "
            "another folder, or delete it."
        )
    try:
        origin, record = read_record(folder)
    except ArtifactError as error:
        return f"unreadable: {error}", None
    if difference := origin.difference(wanted):
        return f"stale: compiled with {difference}", None
    if problem := file_problem(folder, record):
        return f"broken: {problem}", None
    return "", record


def _replace(tree: Path, model: str, part: Path | None) -> None:
    """Rename a model's new folder, if any, to its place: a model's folder is always complete."""
    (tree / MANIFEST_FILE).unlink(missing_ok=True)
    old = tree / f".{model}.old"
    if (tree / model).exists():
        (tree / model).rename(old)
    if part is not None:
        part.rename(tree / model)
    sync_folder(tree)
    if old.exists():  # deleted last: an interruption must not cost the new one
        shutil.rmtree(old)


def _sweep(tree: Path) -> None:
    for model in MODELS:
        for leftover in (tree / f".{model}.{what}" for what in ("part", "old", "failed")):
            if leftover.exists():
                shutil.rmtree(leftover)
    (tree / f".{MANIFEST_FILE}.part").unlink(missing_ok=True)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # skips folders that disappeared
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _check_disk(tree: Path, expected: int) -> None:
    free = shutil.disk_usage(tree).free
    if expected > free:
        raise OutputError(
            f"this compile writes {expected / MB:.1f} MB, and the disk of {tree} has "
            f"{free / MB:.1f} MB free. Free space, or set --out on another disk; nothing was "
            "written."
        )


def _output_error(tree: Path, error: OSError) -> OutputError:
    if is_full(error):
        return OutputError(
            f"no space is left on the disk of {tree}. Free space and run it again: finished models "
            "are reused."
        )
    return OutputError(f"{tree} can't be written: {error}. Choose a folder that you may write to.")
