"""A compiled tree on disk: one folder a graph with its record, and the manifest over all.

    compiled/
      manifest.json             written last: a tree that has one is whole
      thinker/record.json       what the graph was made from, and its part of the manifest
      thinker/...               whatever the target writes
      vision/ audio/ talker/ code_predictor/ code2wav/

A graph's folder appears in one piece, by a rename, and what is in it never changes after.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import ArtifactError

SCHEMA = 2
MANIFEST_FILE = "manifest.json"
RECORD_FILE = "record.json"
_HASHED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that goes into a graph or comes out. shape: a number an axis, or a name where it
    may be of any length."""

    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Call:
    """One way to call a graph. bucket: the compiled sizes by name; a name of its own, where one may
    be any. state: what a call finds from the last one and renews."""

    name: str
    bucket: Mapping[str, int | str]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    state: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class FileRecord:
    """bytes: the size. sha256: 64 hex digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class GraphRecord:
    """What a compiled graph is. files: by path inside the graph's folder. seconds: it took."""

    calls: tuple[Call, ...]
    files: Mapping[str, FileRecord]
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def buckets(self) -> dict[str, list[int]]:
        """Every compiled size by name, ascending; those that may be any are left out."""
        found: dict[str, set[int]] = {}
        for call in self.calls:
            for name, size in call.bucket.items():
                if isinstance(size, int):
                    found.setdefault(name, set()).add(size)
        return {name: sorted(sizes) for name, sizes in found.items()}


@dataclass(frozen=True)
class Manifest:
    """fingerprint: of the checkpoint. plan: plan.CompilePlan.settings. versions: of the run that
    wrote it. graphs: by name."""

    fingerprint: str
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    graphs: Mapping[str, GraphRecord]


@dataclass(frozen=True)
class Origin:
    """What a graph was made from: where any of it differs, it is stale.

    settings: plan.CompilePlan.graph_settings. versions: versions.decisive_versions.
    """

    fingerprint: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    def difference(self, wanted: "Origin") -> str:
        """What differs from `wanted`, in words; "" where nothing does."""
        found = []
        if self.fingerprint != wanted.fingerprint:
            found.append("another checkpoint")
        for ours, theirs in ((self.settings, wanted.settings), (self.versions, wanted.versions)):
            found += [
                f"{name} {_said(ours.get(name))} instead of {_said(theirs.get(name))}"
                for name in sorted({*ours, *theirs})
                if ours.get(name) != theirs.get(name)
            ]
        return ", ".join(found)


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file under `folder` but the record, with size and hash, and brought to the disk."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != RECORD_FILE:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[name] = FileRecord(path.stat().st_size, _sha256(path))
    sync_folder(folder)
    return found


def write_record(folder: Path, origin: Origin, record: GraphRecord) -> None:
    """Put a graph's record beside its files."""
    write_json(folder / RECORD_FILE, {"made_from": asdict(origin), **asdict(record)})


def read_record(folder: Path) -> tuple[Origin, GraphRecord]:
    """A graph's record. Raises ArtifactError where there is none, or it can't be read."""
    raw = _read_json(folder / RECORD_FILE)
    try:
        return Origin(**raw.pop("made_from")), _graph_record(raw)
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / RECORD_FILE} is no record: {error!r}.") from error


def write_manifest(tree: Path, manifest: Manifest) -> None:
    """Say that a tree is whole: the last thing that is written."""
    write_json(tree / MANIFEST_FILE, {"schema": SCHEMA, **asdict(manifest)})


def read_manifest(tree: Path) -> Manifest:
    """Raises ArtifactError where there is none, or of another schema, or it can't be read."""
    path = tree / MANIFEST_FILE
    if not path.exists():
        raise ArtifactError(
            f"{tree} is no whole compiled tree: it has no {MANIFEST_FILE}, which is written last. "
            "Run the compile command again: it goes on where it ended."
        )
    raw = _read_json(path)
    if raw.get("schema") != SCHEMA:
        raise ArtifactError(
            f"{path} is of schema {raw.get('schema')}, this version reads {SCHEMA}. Compile into "
            "another folder, or use the version that wrote it."
        )
    try:
        graphs = {name: _graph_record(graph) for name, graph in raw["graphs"].items()}
        return Manifest(raw["fingerprint"], raw["plan"], raw["versions"], graphs)
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is no manifest ({error!r}). Delete it and compile again: graphs that are "
            "whole are kept."
        ) from error


def file_problem(folder: Path, record: GraphRecord) -> str:
    """The first file of a graph that is missing or of another size, in words; "" for none."""
    for name, file in record.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != file.bytes:
            return f"{path} has {size} bytes instead of {file.bytes}"
    return ""


def check_files(tree: Path, manifest: Manifest) -> None:
    """Raises ArtifactError that names the first file that is missing or of another size."""
    for graph, record in manifest.graphs.items():
        if problem := file_problem(tree / graph, record):
            raise ArtifactError(f"{problem}: of {graph}, the only graph to be compiled anew.")


def verify_files(tree: Path, manifest: Manifest) -> None:
    """`check_files`, and every file hashed: raises ArtifactError that names the first that
    differs."""
    check_files(tree, manifest)
    for graph, record in manifest.graphs.items():
        for name, file in record.files.items():
            if (found := _sha256(tree / graph / name)) != file.sha256:
                raise ArtifactError(
                    f"{tree / graph / name} has changed: its sha256 is {found}, it was "
                    f"{file.sha256}. Delete {tree / graph} and compile again: only it will be."
                )


def _graph_record(raw: Mapping[str, Any]) -> GraphRecord:
    calls = tuple(
        Call(
            call["name"],
            call["bucket"],
            _specs(call["inputs"]),
            _specs(call["outputs"]),
            _specs(call["state"]),
        )
        for call in raw["calls"]
    )
    files = {name: FileRecord(**file) for name, file in raw["files"].items()}
    return GraphRecord(calls, files, raw["seconds"])


def _specs(raw: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(spec["shape"]), spec["dtype"]) for name, spec in raw.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} can't be read: {error}. Delete it and compile again."
        ) from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path} holds a {type(raw).__name__}, not an object.")
    return raw


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write a value beside its path, and rename it when it is on the disk. Raises OSError."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
