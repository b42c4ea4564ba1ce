"""The compile run: compiles the missing or stale graphs of a tree, one after another.

Only one run at a time writes into a tree, because it holds the tree's lock.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import fingerprint
from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    RECORD_FILE,
    GraphRecord,
    Manifest,
    Origin,
    file_problem,
    read_record,
    sync_folder,
    write_manifest,
    write_record,
)
from qwen3_omni_neuron.compilation.plan import GRAPHS, CompilePlan, graphs_of
from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.compilation.versions import installed_versions
from qwen3_omni_neuron.compilation.worker import is_full, run_worker
from qwen3_omni_neuron.errors import ArtifactError, CompileError, OptionError, OutputError

LOCK_FILE = ".lock"
# A killed run's worker process holds the lock until it notices the end of its parent: 0.25 s, and
# longer while an import blocks its watching thread.
WAIT_S = 3.0
_RETRY_S = 0.05


@contextmanager
def tree_lock(tree: Path, wait_s: float = WAIT_S) -> Iterator[int]:
    """Hold the tree's lock. Yields its descriptor; a process that inherits it holds it, too.

    wait_s: time to wait for the end of another run. The system releases the lock when the last
    process that holds it ends, in whatever way.
    Raises CompileError if another run holds it, and OSError if the tree can't be written.
    """
    descriptor = os.open(tree / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, tree, wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, tree: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode().strip()
                raise CompileError(
                    f"another run{f' (process {holder})' if holder else ''} is writing into "
                    f"{tree}. Wait for its end, or take another folder."
                ) from None
            time.sleep(_RETRY_S)


MB = 1e6


class Progress:
    """Receiver of a run's progress; this base class ignores it. Bytes: size of a graph's folder."""

    def begins(self, expected_bytes: Mapping[str, int], reasons: Mapping[str, str]) -> None:
        """Receive the graphs to compile: their expected sizes and the reasons."""

    def advances(self, graph: str, written_bytes: int) -> None:
        """Receive the number of bytes written of a graph; called a few times a second."""

    def compiled(self, graph: str, record: GraphRecord) -> None:
        """Receive the record of a graph that is finished."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    records: records of all graphs that exist and fit the plan, in the plan's order. compiled:
    graphs that this run compiled. missing: the plan's graphs that are still missing, with the
    reason; if it is empty, the tree is complete and has its manifest.
    """

    records: Mapping[str, GraphRecord]
    compiled: tuple[str, ...]
    missing: Mapping[str, str]


def compile_tree(
    plan: CompilePlan,
    tree: Path,
    target: Target,
    only: Collection[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Compile the graphs of a plan that the tree lacks or that are stale.

    Each graph is compiled in a process of its own, into a temporary folder, which gets the graph's
    name when it is complete. An interrupted run leaves the graphs that it finished, and the next
    run continues there. The manifest is removed before the first graph changes, and written when
    all graphs fit the plan. only: the graphs that this run may compile; empty: all.
    Raises OptionError for an unknown graph, CheckpointError, ArtifactError if the folder has
    something else under a graph's name, CompileError (see compilation.runner and
    compilation.worker), OutputError if the tree can't be written; finished graphs are kept.
    """
    graphs = graphs_of(read_config(plan.model))
    if unknown := [name for name in only if name not in graphs]:
        raise OptionError(f"unknown graph {unknown[0]!r}. This checkpoint has {', '.join(graphs)}.")
    try:
        tree.mkdir(parents=True, exist_ok=True)
        with tree_lock(tree) as lock:
            _sweep(tree)
            return _compile(plan, tree, target, graphs, only, progress or Progress(), lock)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise _output_error(tree, error) from error


def _compile(
    plan: CompilePlan,
    tree: Path,
    target: Target,
    graphs: tuple[str, ...],
    only: Collection[str],
    progress: Progress,
    lock: int,
) -> Outcome:
    checkpoint, versions = fingerprint(plan.model), target.versions()
    origins = {g: Origin(checkpoint, plan.graph_settings(g), versions) for g in graphs}
    records: dict[str, GraphRecord] = {}
    missing: dict[str, str] = {}
    for graph, origin in origins.items():
        reason, record = _inspect(tree / graph, origin)
        if record is None:
            missing[graph] = reason
        else:
            records[graph] = record
    chosen = [graph for graph in missing if not only or graph in only]
    expected = {graph: target.expected_bytes(plan, graph) for graph in chosen}
    progress.begins(expected, {graph: missing[graph] for graph in chosen})
    for graph in chosen:
        part = tree / f".{graph}.part"
        part.mkdir()
        try:
            tick = partial(_advance, progress, graph, part)
            record = run_worker(target.compile_graph, plan, graph, part, lock, tick)
            write_record(part, origins[graph], record)
        except BaseException as error:
            written = _folder_bytes(part)
            if target.keeps_failed and isinstance(error, CompileError):
                part.rename(tree / f".{graph}.failed")
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OSError) and is_full(error):
                raise _full(tree, graph, expected[graph], written) from error
            raise
        _swap(tree, graph, part)
        records[graph] = record
        del missing[graph]
        progress.compiled(graph, record)
    ordered = {graph: records[graph] for graph in graphs if graph in records}
    if not missing:
        for graph in set(GRAPHS) - set(graphs):  # left by an earlier checkpoint with a talker
            if (tree / graph / RECORD_FILE).exists():
                (tree / MANIFEST_FILE).unlink(missing_ok=True)
                _discard(tree, graph)
        present = installed_versions() | versions
        write_manifest(tree, Manifest(checkpoint, plan.settings, present, ordered))
    return Outcome(ordered, tuple(chosen), missing)


def _advance(progress: Progress, graph: str, part: Path) -> None:
    progress.advances(graph, _folder_bytes(part))


def _inspect(folder: Path, wanted: Origin) -> tuple[str, GraphRecord | None]:
    """Return the reason why a graph has to be compiled, or its record if it exists and fits.

    Raises ArtifactError for a folder that no run has written, which must not be replaced.
    """
    if not folder.exists():
        return "missing", None
    if not (folder / RECORD_FILE).exists():
        raise ArtifactError(
            f"{folder} is there, and no compiled graph: it has no {RECORD_FILE}. Compile into "
            "another folder, or delete it."
        )
    try:
        origin, record = read_record(folder)
    except ArtifactError as error:
        return f"unreadable: {error}", None
    if difference := origin.difference(wanted):
        return f"stale: made from {difference}", None
    if problem := file_problem(folder, record):
        return f"broken: {problem}", None
    return "", record


def _swap(tree: Path, graph: str, part: Path) -> None:
    """Move a complete graph's folder to its final name."""
    (tree / MANIFEST_FILE).unlink(missing_ok=True)
    if (tree / graph).exists():
        _discard(tree, graph)
    part.rename(tree / graph)
    sync_folder(tree)


def _discard(tree: Path, graph: str) -> None:
    """Delete a graph, renamed first so that a folder with a graph's name is always complete."""
    old = tree / f".{graph}.old"
    (tree / graph).rename(old)
    shutil.rmtree(old)


def _sweep(tree: Path) -> None:
    """Delete temporary files and folders of an interrupted run."""
    for graph in GRAPHS:
        for leftover in (tree / f".{graph}.{what}" for what in ("part", "old", "failed")):
            if leftover.exists():
                shutil.rmtree(leftover)
    (tree / f".{MANIFEST_FILE}.part").unlink(missing_ok=True)


def _folder_bytes(folder: Path) -> int:
    """Return the size in bytes of a folder's files, without files removed meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # skips a folder that is gone
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _full(tree: Path, graph: str, expected: int, written: int) -> OutputError:
    free = shutil.disk_usage(tree).free
    return OutputError(
        f"no space is left for {graph}: it takes about {expected / MB:.1f} MB, {written / MB:.1f} "
        f"MB of it went onto the disk of {tree}, which has {free / MB:.1f} MB free now. Make room "
        "and run it again: the graphs that are finished are kept."
    )


def _output_error(tree: Path, error: OSError) -> OutputError:
    if is_full(error):
        return OutputError(
            f"no space is left on the disk of {tree}. Make room and run it again: the graphs that "
            "are finished are kept."
        )
    return OutputError(f"{tree} can't be written: {error}. Choose a folder that you may write to.")
