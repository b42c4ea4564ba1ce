"""A compiled tree's manifest: written, read and checked against the files.

    compiled/
      manifest.json             written last: a tree that has one is complete
      thinker/record.json       inputs of the model's compile, and its part of the manifest
      thinker/...               the target's files
      vision/ audio/ talker/ code_predictor/ code2wav/

A model's folder appears complete, by a rename, and never changes.

In JSON, a model is under "graphs" and its graphs under "calls".
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from qwen3_omni_neuron.errors import ArtifactError

SCHEMA = 2
MANIFEST_FILE = "manifest.json"
RECORD_FILE = "record.json"
_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorRecord:
    """A graph's input or output. shape: lengths, or an axis's name for any length."""

    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class GraphRecord:
    """One graph of a model at one bucket.

    bucket: the compiled sizes by name; a string for any size.
    """

    name: str
    bucket: Mapping[str, int | str]
    inputs: Mapping[str, TensorRecord]
    outputs: Mapping[str, TensorRecord]
    state: Mapping[str, TensorRecord]


@dataclass(frozen=True)
class FileRecord:
    """Size and sha256, 64 hex digits, of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelRecord:
    """One compiled model.

    graphs: at every bucket; none on a CPU. files: by path inside the model's folder.
    """

    graphs: tuple[GraphRecord, ...]
    files: Mapping[str, FileRecord]
    seconds: float

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def buckets(self) -> dict[str, list[int]]:
        """Compiled sizes by name, ascending; names that allow any size are left out."""
        found: dict[str, set[int]] = {}
        for graph in self.graphs:
            for name, size in graph.bucket.items():
                if isinstance(size, int):
                    found.setdefault(name, set()).add(size)
        return {name: sorted(sizes) for name, sizes in found.items()}


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json.

    fingerprint: the checkpoint's (see checkpoint.files). plan: CompilePlan.settings. versions:
    Target.versions and other packages'. adapters: Checkpoint.merged.
    """

    fingerprint: str
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    models: Mapping[str, ModelRecord]
    adapters: Sequence[str] = ()


@dataclass(frozen=True)
class Origin:
    """Inputs of a model's compile; if one changes, the model is stale.

    settings: CompilePlan.model_settings. versions: Target.versions.
    """

    fingerprint: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    def difference(self, wanted: "Origin") -> str:
        """Describe the difference from `wanted`; "" if none."""
        found = []
        if self.fingerprint != wanted.fingerprint:
            found.append("another checkpoint, or other adapters")
        for ours, theirs in ((self.settings, wanted.settings), (self.versions, wanted.versions)):
            found += [
                f"{name} {_shown(ours.get(name))} instead of {_shown(theirs.get(name))}"
                for name in sorted({*ours, *theirs})
                if ours.get(name) != theirs.get(name)
            ]
        return ", ".join(found)


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Flush every file under `folder` to disk; return sizes and hashes by path."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != RECORD_FILE:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[name] = FileRecord(path.stat().st_size, file_sha256(path))
    sync_folder(folder)
    return found


def write_record(folder: Path, origin: Origin, record: ModelRecord) -> None:
    """Write a model's record beside its files."""
    write_json(folder / RECORD_FILE, {"made_from": asdict(origin), **_model_json(record)})


def read_record(folder: Path) -> tuple[Origin, ModelRecord]:
    """Read a model's record. Raises ArtifactError."""
    raw = _read_json(folder / RECORD_FILE)
    try:
        return Origin(**raw["made_from"]), _model_record(raw)
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / RECORD_FILE} is not a record: {error!r}.") from error


def write_manifest(tree: Path, manifest: Manifest) -> None:
    """Write the manifest, last."""
    raw = {"schema": SCHEMA, **asdict(replace(manifest, models={}))}
    del raw["models"]
    raw["graphs"] = {name: _model_json(model) for name, model in manifest.models.items()}
    write_json(tree / MANIFEST_FILE, raw)


def read_manifest(tree: Path) -> Manifest:
    """Read a tree's manifest. Raises ArtifactError, also for another schema."""
    path = tree / MANIFEST_FILE
    if not path.exists():
        raise ArtifactError(
            f"{tree} is not a complete compiled tree: it has no {MANIFEST_FILE}, which is written "
            "last. Run the compile command again: it continues where it ended."
        )
    raw = _read_json(path)
    try:
        if (schema := raw.get("schema")) != SCHEMA:
            raise ArtifactError(
                f"{path} is of schema {schema!r}, this version reads {SCHEMA}. Run the compile "
                "command again for this folder, or use the version that wrote it."
            )
        models = {name: _model_record(model) for name, model in raw["graphs"].items()}
        adapters = raw.get("adapters", ())
        return Manifest(raw["fingerprint"], raw["plan"], raw["versions"], models, adapters)
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is not a manifest ({error!r}). Delete it and compile again: complete models "
            "are reused."
        ) from error


def file_problem(folder: Path, record: ModelRecord) -> str:
    """Describe a model's first file that is missing or of another size; "" for none."""
    for name, file in record.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != file.bytes:
            return f"{path} has {size} bytes instead of {file.bytes}"
    return ""


def check_files(tree: Path, manifest: Manifest) -> None:
    """Raise ArtifactError for the first file that is missing or of another size."""
    for model, record in manifest.models.items():
        if problem := file_problem(tree / model, record):
            raise ArtifactError(f"{problem}. Compile again: only {model} will be recompiled.")


def verify_files(tree: Path, manifest: Manifest) -> None:
    """Do `check_files`, and hash every file. Raises ArtifactError for the first mismatch."""
    check_files(tree, manifest)
    for model, record in manifest.models.items():
        for name, file in record.files.items():
            if (found := file_sha256(tree / model / name)) != file.sha256:
                raise ArtifactError(
                    f"{tree / model / name} has changed: its sha256 is {found} instead of "
                    f"{file.sha256}. Delete {tree / model} and compile again, which skips the rest."
                )


def _model_json(record: ModelRecord) -> dict[str, Any]:
    raw = asdict(record)
    return {"calls": raw.pop("graphs"), **raw}


def _model_record(raw: Any) -> ModelRecord:
    graphs = tuple(
        GraphRecord(
            graph["name"],
            graph["bucket"],
            *(_specs(graph[kind]) for kind in ("inputs", "outputs", "state")),
        )
        for graph in raw["calls"]
    )
    files = {name: FileRecord(**file) for name, file in raw["files"].items()}
    return ModelRecord(graphs, files, raw["seconds"])


def _specs(raw: Any) -> dict[str, TensorRecord]:
    return {name: TensorRecord(tuple(spec["shape"]), spec["dtype"]) for name, spec in raw.items()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} can't be read: {error}. Delete it and compile again."
        ) from error


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file as 64 hex digits. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically. Raises OSError."""
    with written_whole(path) as file:
        file.write((json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears at its path, flushed, after the block.

    A block that raises leaves no file; a killed process leaves `.NAME.part`.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
