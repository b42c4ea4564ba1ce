"""A checkpoint's files: found on disk or on the hub, read by tensor name, and fingerprinted.

Quantised matrices are read as weights (checkpoint.quantised) or published numbers. Adapters are
merged while weights are read (checkpoint.adapters).
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qwen3_omni_neuron.checkpoint.adapters import Adapter, AdapterPath, adapters_digest, unreadable
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.drawn import DRAWN_FILE, DrawnTensors
from qwen3_omni_neuron.checkpoint.headers import (
    INDEX_FILE,
    LENGTH_BYTES,
    StoredTensor,
    header_bytes,
    parse_header,
    read_headers,
    read_index,
)
from qwen3_omni_neuron.checkpoint.quantised import (
    QuantisedForm,
    find_settings,
    quantised_forms,
    read_settings,
)
from qwen3_omni_neuron.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERSATION_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
)
LISTED_FILES = 12  # names that an error lists
_HUB_FILES = ("*.json", "*.txt", "*.jinja", "*.safetensors")


def resolve_checkpoint(model_path: str | Path) -> Path:
    """Return a checkpoint's folder from its path or hub id ("Qwen/Qwen3-Omni-...").

    A hub id is downloaded, or read from the local cache if the hub is unreachable. Raises
    CheckpointError if neither is found, and, before downloading weights, for another model or an
    unsupported quantisation.
    """
    if (folder := local_folder(model_path)) is not None:
        return folder
    folder = download(str(model_path), ("*.json",))
    read_settings(folder)
    read_config(folder)
    return download(str(model_path), _HUB_FILES)


def local_folder(model_path: str | Path) -> Path | None:
    """Return a checkpoint's folder, None for a hub id. Raises CheckpointError for neither."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file; model_path must be a checkpoint's folder. GGUF is not supported."
        )
    if not _HUB_ID.fullmatch(str(model_path)):
        raise CheckpointError(
            f"{folder} does not exist. model_path must be a checkpoint's folder, or a hub id "
            "such as Qwen/Qwen3-Omni-30B-A3B-Instruct."
        )
    return None


def download(hub_id: str, patterns: Sequence[str]) -> Path:
    """Download a hub id's matching files, without subfolders; return their folder.

    Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download  # slow to import

    try:
        found = snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"])
    except Exception as error:  # also the HTTP library's
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"{hub_id} is not a local folder, and could not be fetched from the hub: {reason}. "
            "Check the id and the network, or download it elsewhere and pass its folder."
        ) from error
    return Path(found)


class Checkpoint:
    """A checkpoint's tensors by released name, from shards or drawn (checkpoint.drawn).

    quantised: forms of quantised matrices by name, except those that an adapter changes. Shards are
    open only while read. Raises CheckpointError if a file is missing or broken, a form is
    unsupported, or an adapter can't be merged.
    """

    def __init__(self, folder: Path, adapters: Sequence[AdapterPath] = ()):
        self.folder = folder
        self._drawn = DrawnTensors(folder) if (folder / DRAWN_FILE).exists() else None
        self._files = {} if self._drawn else tensor_files(folder)
        self._names = set(self._files if self._drawn is None else self._drawn.shapes)
        headers = {} if self._drawn else self.headers()  # checks all files before mapping one
        settings = None if self._drawn else read_settings(folder)
        self.quantised, used = quantised_forms(headers, settings)
        self._names = (self._names - used) | self.quantised.keys()
        self._forms, self._adapters = self.quantised, list[Adapter]()
        if adapters:
            if self._drawn is not None:
                raise CheckpointError(f"{folder} has drawn weights: no adapter can be merged.")
            shapes = {n: (self._forms.get(n) or headers[n]).shape for n in self._names}
            self._adapters = [Adapter(adapter, shapes) for adapter in adapters]
            self.quantised = {n: f for n, f in self._forms.items() if n not in self.merged_names}

    @property
    def names(self) -> Iterable[str]:
        """Released names of all tensors."""
        return self._names

    @property
    def merged_names(self) -> set[str]:
        """Released names of weights that adapters change."""
        return {name for adapter in self._adapters for name in adapter.changes}

    @property
    def merged(self) -> tuple[str, ...]:
        """Text for each adapter: folder, weight, and number of changed weights."""
        texts = []
        for adapter in self._adapters:
            rounded = len(self._forms.keys() & adapter.changes)
            anew = f", {rounded} of them quantised, which are rounded again" if rounded else ""
            texts.append(f"{adapter.given} merged into {len(adapter.changes)} weights{anew}")
        return tuple(texts)

    def headers(self) -> dict[str, StoredTensor]:
        """Return each tensor's type, shape and place, by its name in the files.

        Raises CheckpointError, also for drawn weights.
        """
        if self._drawn is not None:
            raise CheckpointError(f"{self.folder} has drawn weights, which have no files.")
        found: dict[str, StoredTensor] = {}
        for file in sorted(set(self._files.values())):
            stored = read_headers(self.folder, [file]).items()
            found |= {name: tensor for name, tensor in stored if self._files.get(name) == file}
        if lacking := self._files.keys() - found.keys():
            name = min(lacking)
            shard = self.folder / self._files[name]
            raise CheckpointError(
                f"{shard} lacks {name}, which {INDEX_FILE} has there; "
                f"{len(lacking)} tensors are missing in all. Download both again."
            )
        return found

    @contextmanager
    def reader(self) -> Iterator["ShardReader | DrawnTensors"]:
        """Open a reader."""
        reader = self._drawn or ShardReader(self.folder, self._files, self._forms, self._adapters)
        try:
            yield reader
        finally:
            reader.close()


OPEN_BYTES = 64 << 20  # limit of the shards that a reader keeps open


class ShardReader:
    """Reader of tensors by name; keeps one large shard open, or several small ones.

    Adapters are merged in order. Mapped files count as this process's memory.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        quantised: Mapping[str, QuantisedForm],
        adapters: Sequence[Adapter] = (),
    ):
        self._folder = folder
        self._files = files
        self._quantised = quantised
        self._adapters = adapters
        self._open: dict[str, Any] = {}
        self._open_adapters: dict[Path, Any] = {}
        self._open_bytes = 0

    def tensor(self, name: str) -> "Tensor":
        """Read a tensor; a quantised or merged matrix as float32 weights.

        Raises CheckpointError, also for a merged matrix that is not finite.
        """
        weight = self._weight(name)
        for adapter in self._adapters:
            if change := adapter.changes.get(name):
                from qwen3_omni_neuron.checkpoint.numbers import check_finite  # imports torch

                weight = change.merged(weight, partial(self._of_adapter, adapter.path))
                check_finite(weight, f"{name} with the adapter {adapter.given}")
        return weight

    def dtype(self, name: str) -> "torch.dtype":
        """Return the dtype of a tensor as `tensor` reads it. Raises CheckpointError."""
        merged = any(name in adapter.changes for adapter in self._adapters)
        if name not in self._quantised and not merged:
            return self._stored(name).dtype
        import torch

        return torch.float32

    def numbers(self, name: str) -> "tuple[Tensor, Tensor]":
        """Read a matrix's published integers and scales; see checkpoint.numbers.read_numbers."""
        from qwen3_omni_neuron.checkpoint.numbers import check_finite, read_numbers  # import torch

        numbers, scale = read_numbers(self._quantised[name], self._stored)
        check_finite(scale, name)
        return numbers, scale

    def _weight(self, name: str) -> "Tensor":
        if name not in self._quantised:
            return self._stored(name)
        from qwen3_omni_neuron.checkpoint.numbers import read_weights  # imports torch

        return read_weights(self._quantised[name], self._stored)

    def _of_adapter(self, path: Path, name: str) -> "Tensor":
        try:
            if path not in self._open_adapters:
                self._open_adapters[path] = safe_open(path, framework="pt")
            return self._open_adapters[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise unreadable(path.parent, error) from error

    def _stored(self, name: str) -> "Tensor":
        file_name = self._files[name]
        path = self._folder / file_name
        try:
            if file_name not in self._open:
                size = path.stat().st_size
                if self._open_bytes + size > OPEN_BYTES:
                    self._close_shards()
                self._open[file_name] = safe_open(path, framework="pt")
                self._open_bytes += size
            return self._open[file_name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} can't be read ({error}). Download the shard again."
            ) from error

    def trim(self) -> None:
        """Close adapters and large shards, to free their memory."""
        self._open_adapters.clear()
        if self._open_bytes > OPEN_BYTES:
            self._close_shards()

    def close(self) -> None:
        """Close the files; reading reopens them."""
        self._open_adapters.clear()
        self._close_shards()

    def _close_shards(self) -> None:
        self._open.clear()
        self._open_bytes = 0


def tensor_files(folder: Path) -> dict[str, str]:
    """Return each tensor's file name. Raises CheckpointError."""
    files = read_index(folder)
    if files is not None:
        shards = set(files.values())
        if absent := sorted(shard for shard in shards if not (folder / shard).exists()):
            more = f" and {len(absent) - LISTED_FILES} more" if len(absent) > LISTED_FILES else ""
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of its {len(shards)} shards: "
                f"{', '.join(absent[:LISTED_FILES])}{more}. Download them again."
            )
        return files
    if not (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}. Name the checkpoint's folder, "
            "or download its weights again."
        )
    return dict.fromkeys(read_headers(folder, [SINGLE_FILE]), SINGLE_FILE)


SAMPLE_BYTES = 64


def fingerprint(folder: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """Return a sha256 that identifies a checkpoint.

    It covers config.json, other quantisation settings, the index, and each shard's size, header,
    and 64 bytes in the middle of every tensor: fine-tunes may differ in nothing else. The released
    checkpoint takes seconds: 28,000 reads. Raises CheckpointError.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        if (settings := find_settings(folder)) and settings[0] != "config.json":
            digest.update((folder / settings[0]).read_bytes())
        if (folder / DRAWN_FILE).exists():
            digest.update((folder / DRAWN_FILE).read_bytes())
        else:
            if (folder / INDEX_FILE).exists():
                digest.update((folder / INDEX_FILE).read_bytes())
            for shard in sorted(set((read_index(folder) or {"": SINGLE_FILE}).values())):
                _add_shard(folder / shard, digest)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} can't be fingerprinted: {error}. Is it a complete checkpoint, with "
            "config.json and every shard? Download what is missing."
        ) from error
    if adapters:
        digest.update(adapters_digest(adapters).encode())
    return digest.hexdigest()


def conversation_fingerprint(folder: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """Return a sha256 of all that a stored conversation depends on.

    Covers `fingerprint`, tokenizer, template and media settings. Raises CheckpointError, OSError.
    """
    digest = hashlib.sha256(fingerprint(folder, adapters).encode())
    for path in (folder / name for name in _CONVERSATION_FILES):
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _add_shard(path: Path, digest: "hashlib._Hash") -> None:
    with path.open("rb") as file:
        header = header_bytes(file)
        digest.update(f"{path.name} {os.fstat(file.fileno()).st_size}\n".encode())
        digest.update(header)
        for _, (_, _, begin, end) in sorted(parse_header(header).items()):
            middle = LENGTH_BYTES + len(header) + (begin + end) // 2
            digest.update(os.pread(file.fileno(), min(SAMPLE_BYTES, end - begin), middle))
