"""A checkpoint's files: found on disk or on the hub, read by tensor name, and fingerprinted."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qwen3_omni_neuron.checkpoint.drawn import DRAWN_FILE, DrawnTensors
from qwen3_omni_neuron.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.txt", "*.jinja", "*.safetensors")


def resolve_checkpoint(model_path: str | Path) -> Path:
    """Return a checkpoint's folder, given that folder or a hub id ("Qwen/Qwen3-Omni-...").

    A hub id is downloaded, or taken from the local cache when the hub can't be reached.
    Raises CheckpointError when there is neither a folder nor a download.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; model_path must be a checkpoint's folder.")
    if not _HUB_ID.fullmatch(str(model_path)):
        raise CheckpointError(
            f"{folder} does not exist. model_path must be a checkpoint's folder, or a hub id "
            "such as Qwen/Qwen3-Omni-30B-A3B-Instruct."
        )
    from huggingface_hub import snapshot_download  # slow to import; a folder does not need it

    try:
        return Path(snapshot_download(str(model_path), allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client also raises its HTTP library's errors
        raise CheckpointError(
            f"{model_path} is no local folder, and the hub gave no checkpoint of that name: "
            f"{error}. Check the id and the network, or download it elsewhere and pass its folder."
        ) from error


class Checkpoint:
    """A checkpoint's tensors by released name: those of its shards, or drawn (checkpoint.drawn).

    Shards are opened only while they are read, so that no file stays mapped in memory. Raises
    CheckpointError if the index, a shard, or the single file is missing or broken.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._drawn = DrawnTensors(folder) if (folder / DRAWN_FILE).exists() else None
        self._files = {} if self._drawn else _tensor_files(folder)

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._files.keys() if self._drawn is None else self._drawn.shapes.keys()

    @contextmanager
    def reader(self) -> Iterator["ShardReader | DrawnTensors"]:
        """Open a reader, which is closed at the end of the `with` block."""
        reader = self._drawn or ShardReader(self.folder, self._files)
        try:
            yield reader
        finally:
            reader.close()


OPEN_BYTES = 64 << 20  # size limit of the shards that a reader keeps open


class ShardReader:
    """Reader of tensors by name, which keeps one large shard open at a time, or several small ones.

    The parts read from an open shard count as this process's memory.
    """

    def __init__(self, folder: Path, files: dict[str, str]):
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}
        self._open_bytes = 0

    def tensor(self, name: str) -> "Tensor":
        """Read a tensor. Raises CheckpointError when its shard is missing or broken."""
        file_name = self._files[name]
        path = self._folder / file_name
        try:
            if file_name not in self._open:
                size = path.stat().st_size
                if self._open_bytes + size > OPEN_BYTES:
                    self.close()
                self._open[file_name] = safe_open(path, framework="pt")
                self._open_bytes += size
            return self._open[file_name].get_tensor(name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing, and {name} is in it. Download the shard again."
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} can't be read ({error}): it is truncated or broken. "
                "Download the shard again."
            ) from error

    def trim(self) -> None:
        """Close the open shards if they are large, so that they no longer count."""
        if self._open_bytes > OPEN_BYTES:
            self.close()

    def close(self) -> None:
        """Close the open shards; the next tensor opens one again."""
        self._open.clear()
        self._open_bytes = 0


def _tensor_files(folder: Path) -> dict[str, str]:
    """Return every tensor's file name, from the index or from the single file's header."""
    index_path = folder / INDEX_FILE
    if index_path.exists():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{index_path} can't be read: {error!r}. Download it again."
            ) from error
        absent = sorted(f for f in set(weight_map.values()) if not (folder / f).exists())
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of its {len(set(weight_map.values()))} shards: "
                f"{', '.join(absent)}. Download them again."
            )
        return dict(weight_map)
    single = folder / SINGLE_FILE
    if not single.exists():
        raise CheckpointError(
            f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}. Name the checkpoint's folder, "
            "or download its weights again."
        )
    try:
        with safe_open(single, framework="pt") as shard:
            return dict.fromkeys(shard.keys(), SINGLE_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{single} can't be read ({error}): it is truncated or broken. Download it again."
        ) from error


SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def fingerprint(folder: Path) -> str:
    """Return a sha256, as 64 hex digits, that tells one checkpoint from another.

    It covers config.json, the index, and for every shard its size, its header (names, types,
    shapes and offsets of its tensors), and the 64 bytes in the middle of every tensor: two
    fine-tunes of one model differ in nothing else. Paths and times of files don't count. A change
    of values outside the middle of every tensor is not noticed.
    Takes seconds for the released checkpoint: 28,000 reads.
    Raises CheckpointError for a file that is missing or can't be read.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        if (folder / DRAWN_FILE).exists():
            digest.update((folder / DRAWN_FILE).read_bytes())
            return digest.hexdigest()
        for shard in _shards(folder, digest):
            _add_shard(folder / shard, digest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} can't be fingerprinted: {error!r}. Is it a whole checkpoint, with "
            "config.json and every shard? Download what is missing."
        ) from error
    return digest.hexdigest()


def _shards(folder: Path, digest: "hashlib._Hash") -> list[str]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    content = index.read_bytes()
    digest.update(content)
    return sorted(set(json.loads(content)["weight_map"].values()))


def _add_shard(path: Path, digest: "hashlib._Hash") -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = file.read(length)
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(header)
        for tensor, stored in sorted(json.loads(header).items()):
            if tensor == "__metadata__":
                continue
            begin, end = stored["data_offsets"]
            middle = 8 + length + (begin + end) // 2
            digest.update(os.pread(file.fileno(), min(SAMPLE_BYTES, end - begin), middle))
