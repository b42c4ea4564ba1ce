"""Compiled trees on shared storage: pushed under a hash of their content, pulled once a machine.

    URL/HASH/DIR/FILE          the files of each model, as they are in the tree
    URL/HASH/manifest.json     written last: a tree that has one is whole

HASH is the sha256 of manifest.json, which has the sha256 of every file, so an address always names
the same content: another tree has another address. A URL is any address that fsspec opens: a
folder, s3://, gs://, hf://, https:// (for pull only). The records of single models, with which a
compile continues, are not copied.
"""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    RECORD_FILE,
    FileRecord,
    Manifest,
    check_files,
    file_sha256,
    manifest_bytes,
    parse_manifest,
    verify_files,
    written_whole,
)
from qwen3_omni_neuron.compilation.runner import MB, tree_lock
from qwen3_omni_neuron.compilation.worker import is_full
from qwen3_omni_neuron.errors import ArtifactError, NotInstalledError, OptionError, OutputError
from qwen3_omni_neuron.untrusted_files import MOST_BYTES

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

logger = logging.getLogger(__name__)

PULL_TIMEOUT_S = 3600.0  # time for another process to copy 70 GB from slow storage
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 1 << 20


def local_tree(compiled: str | Path) -> Path:
    """Return the folder of a compiled tree. compiled: that folder, or a URL to pull it from."""
    if isinstance(compiled, str) and "://" in compiled:
        return pull_tree(compiled)
    return Path(compiled)


def tree_cache() -> Path:
    """Return the folder of pulled trees: qwen3-omni-neuron/trees in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qwen3-omni-neuron" / "trees"


def push_tree(tree: Path, url: str, callback: "Callback | None" = None) -> str:
    """Copy a compiled tree to URL/HASH, and return that address.

    Its files are hashed first. Files that exist there with the right size are not copied again, so
    that an interrupted push continues. callback: receives the size of the tree in bytes, and the
    number of bytes done, kept ones included.
    Raises ArtifactError if the tree is incomplete or a file has changed, OptionError and
    NotInstalledError for a URL, and OutputError if the URL can't be written.
    """
    content = manifest_bytes(tree)
    manifest = parse_manifest(content, str(tree / MANIFEST_FILE))
    verify_files(tree, manifest)
    store = _Store(f"{url.rstrip('/')}/{_hash(content)}")
    if store.size(MANIFEST_FILE) == len(content) and store.manifest() == content:
        return store.url
    for name, file, counted in _counted(manifest, callback):
        if store.size(name) != file.bytes:
            with store.writing(name) as path:
                store.system.put_file(str(tree / name), path, callback=counted)
    with store.writing(MANIFEST_FILE) as path:
        store.system.pipe_file(path, content)
    return store.url


def pull_tree(url: str, folder: Path | None = None, callback: "Callback | None" = None) -> Path:
    """Copy a compiled tree from its address into a folder, and return the folder.

    folder: by default a folder named by the tree's hash in `tree_cache`. A tree that exists there
    is returned at once, without access to the storage if the address ends with its hash. Each file
    is copied, hashed, and then gets its name: an interrupted pull continues, and hashes the
    existing files. The manifest is written last. If several processes pull, one copies and the
    others wait. callback: see push_tree.
    Raises ArtifactError for a tree that is missing, incomplete or different from its hash, or if
    the folder has other content, OptionError and NotInstalledError for a URL, OutputError if the
    folder can't be written, and CompileError if another process holds it for an hour.
    """
    last = url.rstrip("/").rpartition("/")[2]
    expected = last if _HASH.fullmatch(last) else None
    if expected is not None:
        place = folder or tree_cache() / expected
        if _is_whole(place, expected):
            return place
    store = _Store(url)
    content = store.manifest()
    found = _hash(content)
    if expected not in (None, found):
        raise ArtifactError(
            f"{url} has a {MANIFEST_FILE} whose sha256 is {found}: it is not the tree of that "
            "address. Push that tree again, or name the address that push printed."
        )
    manifest = parse_manifest(content, f"{url}/{MANIFEST_FILE}")
    place = folder or tree_cache() / found
    _refuse_others(place, found)  # before the wait for a compile that holds the lock
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tree_lock(place, PULL_TIMEOUT_S):
            if not _is_whole(place, found):
                _refuse_others(place, found)  # files may have come during the wait
                _fill(place, store, manifest, content, callback)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"{place} can't be written: {error}. Make room or take another folder, and run it "
            "again: files that are whole are kept."
        ) from error
    return place


class _Store:
    """The files of one tree on shared storage.

    Raises OptionError and NotInstalledError for an address that fsspec can't open.
    """

    def __init__(self, url: str):
        import fsspec.core

        self.url = url.rstrip("/")
        try:
            self.system, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise NotInstalledError(
                f"{url} needs a package that is not installed: {error}. Install it with pip."
            ) from error
        except ValueError as error:
            raise OptionError(
                f"{url} can't be opened: {error}. A URL is a folder, or an address such as "
                "s3://BUCKET/TREES."
            ) from error
        self.system.invalidate_cache()

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None if it does not exist."""
        with self.reading(name) as path, suppress(FileNotFoundError):
            return int(self.system.size(path))
        return None

    def manifest(self) -> bytes:
        """Return the content of the tree's manifest, up to the size that manifests are read to."""
        with self.reading(MANIFEST_FILE) as path, self.system.open(path, "rb") as file:
            content = bytearray()
            while block := file.read(_BLOCK_BYTES):  # HTTP may give shorter blocks
                content += block
                if len(content) > MOST_BYTES:
                    raise ValueError(f"it has more than {MOST_BYTES} bytes")
            return bytes(content)

    @contextmanager
    def reading(self, name: str) -> Iterator[str]:
        """Yield the path of a file to read. Raises ArtifactError if it can't be read."""
        try:
            yield f"{self._root}/{name}"
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{self.url} is not a whole compiled tree: it has no {name}. Push the tree again: "
                "it goes on where it ended."
            ) from error
        except Exception as error:  # any error of the storage's client
            if isinstance(error, OSError) and is_full(error):  # the disk that it is copied to
                raise
            raise ArtifactError(
                f"{self.url}/{name} can't be read: {error!r}. Check the address, the network and "
                "what you may read there, and run it again: files that are whole are kept."
            ) from error

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Yield the path to write a file to. Raises OutputError if it can't be written.

        Object storage shows a file when it is whole; a folder gets it under its name at the end.
        """
        from fsspec.implementations.local import LocalFileSystem

        path = f"{self._root}/{name}"
        try:
            if isinstance(self.system, LocalFileSystem):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with written_whole(Path(path)) as file:
                    yield file.name
            else:
                yield path
        except Exception as error:
            raise OutputError(
                f"{self.url}/{name} can't be written: {error}. Check the address and what you may "
                "write there, and run it again: files that are whole are kept."
            ) from error


def _fill(
    folder: Path,
    store: _Store,
    manifest: Manifest,
    content: bytes,
    callback: "Callback | None",
) -> None:
    """Copy the files of a tree that a folder lacks, the manifest last."""
    started_s = time.monotonic()
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    lacking = (file.bytes for name, file in _files(manifest) if not _is_sized(folder / name, file))
    missing = sum(lacking)
    if missing > (free := shutil.disk_usage(folder).free):
        raise OutputError(
            f"{missing / MB:.1f} MB of {store.url} are not in {folder} yet, and its disk has "
            f"{free / MB:.1f} MB free. Make room or take another folder, and run it again: files "
            "that are whole are kept."
        )
    logger.info("pulling %.1f MB of %s into %s", missing / MB, store.url, folder)
    for name, file, counted in _counted(manifest, callback):
        path = folder / name
        if _is_sized(path, file) and file_sha256(path) == file.sha256:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as output:
            part = Path(output.name)
            with store.reading(name) as source:
                store.system.get_file(source, str(part), callback=counted)
            if (found := file_sha256(part)) != file.sha256:
                raise ArtifactError(
                    f"{store.url}/{name} is not what was compiled: the sha256 of its "
                    f"{part.stat().st_size} bytes is {found}, and {file.sha256} of {file.bytes} "
                    "bytes is expected. Run it again; if it stays so, delete it there and push the "
                    "tree again."
                )
    with written_whole(folder / MANIFEST_FILE) as output:
        output.write(content)
    logger.info("pulled %s in %.1f s", store.url, time.monotonic() - started_s)


def _counted(
    manifest: Manifest, callback: "Callback | None"
) -> Iterator[tuple[str, FileRecord, "Callback"]]:
    """Yield every file of a tree, its path first, with the callback of its copy.

    callback: receives the bytes of all files; those of a file are done when the next one is taken.
    """
    from fsspec.callbacks import Callback

    files, whole = _files(manifest), Callback() if callback is None else callback
    whole.set_size(sum(file.bytes for _, file in files))
    for name, file in files:
        before = whole.value
        hooks = {"tree": lambda _, done, before=before: whole.absolute_update(before + done)}
        yield name, file, Callback(hooks=hooks)
        whole.absolute_update(before + file.bytes)


def _is_sized(path: Path, file: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes


def _is_whole(folder: Path, wanted: str) -> bool:
    """Return whether a folder has the tree of a hash, with all files of the right size."""
    try:
        content = manifest_bytes(folder)
        if _hash(content) != wanted:
            return False
        check_files(folder, parse_manifest(content, str(folder)))
    except ArtifactError:
        return False
    return True


def _refuse_others(folder: Path, wanted: str) -> None:
    """Check that a folder has no other tree, complete or in compilation. Raises ArtifactError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if _hash((folder / MANIFEST_FILE).read_bytes()) != wanted:
            raise ArtifactError(
                f"{folder} has another tree. Pull into another folder, or delete it."
            )
    if found := sorted(folder.glob(f"*/{RECORD_FILE}")):
        raise ArtifactError(
            f"{folder} is a folder that compile writes into: it has {found[0]}. Pull into another."
        )


def _files(manifest: Manifest) -> list[tuple[str, FileRecord]]:
    """Return every file of a tree with its path in the tree."""
    return [
        (f"{model}/{name}", file)
        for model, record in manifest.models.items()
        for name, file in record.files.items()
    ]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
