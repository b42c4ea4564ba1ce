"""Config and headers of a checkpoint on the hub, without its weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qwen3_omni_neuron.checkpoint.files import (
    HUB_FILES,
    SINGLE_FILE,
    download,
    local_folder,
    tensor_files,
)
from qwen3_omni_neuron.checkpoint.headers import (
    LENGTH_BYTES,
    header_length,
    parse_header,
    read_index,
)
from qwen3_omni_neuron.checkpoint.quantised import READ_WITH_HEADERS
from qwen3_omni_neuron.errors import CheckpointError

_TIMEOUT_S = 30
_PART_BYTES = 65536  # read at a time
_NEAR_BYTES = 65536  # tensors so near to each other are fetched at once
_MOST_BYTES = 64  # a tensor that is read with the headers has two numbers
_MOST_READ_BYTES = 64 << 20  # fetched of a shard beside its header, gaps between tensors included
ReadBytes = Callable[[int, int], bytes]
"""Function that reads a file's bytes from a place to another."""


@contextmanager
def open_headers(model_path: str | Path) -> Iterator[Path]:
    """Yield a folder with a checkpoint's config and the headers of its shards.

    model_path: see checkpoint.files.resolve_checkpoint. A folder, or a hub id whose shards are in
    the local cache, gives the checkpoint's own folder. For another hub id its JSON files are
    downloaded, and of each shard no more than the header and what is read with it; the folder lasts
    as long as the `with` block, and its shards have holes in place of weights. Raises
    CheckpointError.
    """
    folder = local_folder(model_path) or _cached(str(model_path))
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory() as made:
        _fetch(str(model_path), Path(made))
        yield Path(made)


def _cached(hub_id: str) -> Path | None:
    """Return the folder of the local cache that has all shards of a hub id, None without one."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=[*HUB_FILES], local_files_only=True))
        tensor_files(folder)
    except (OSError, CheckpointError):  # the hub client's errors of the cache are OSErrors
        return None
    return folder


def _fetch(hub_id: str, to: Path) -> None:
    from huggingface_hub import hf_hub_url

    folder = download(hub_id, ["*.json"])
    for path in folder.glob("*.json"):
        (to / path.name).symlink_to(path.resolve())
    for shard in _shards(folder):
        url = hf_hub_url(hub_id, shard, revision=folder.name)

        try:
            _fetch_shard(partial(read_range, url), to / shard)
        except Exception as error:  # the hub client also raises its HTTP library's errors
            raise CheckpointError(
                f"the header of {shard} of {hub_id} can't be fetched: {error}. Check the network, "
                "or download the checkpoint and pass its folder."
            ) from error


def read_range(url: str, begin: int, end: int) -> bytes:
    """Read a file's bytes from a place to another.

    A hub that ignores the range would send a whole shard, gigabytes: status and headers are looked
    at before the body is read, and no more of it than was asked for. Raises ValueError for a reply
    with other bytes, and the hub client's errors.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    span, size = f"{begin}-{end - 1}", end - begin
    headers = {"Range": f"bytes={span}", "Accept-Encoding": "identity"}
    given: dict[str, Any] = {"headers": build_hf_headers() | headers, "timeout": _TIMEOUT_S}
    # The hub client's session is one of requests before its version 1, and then one of httpx.
    session: Any = get_session()
    if callable(session.stream):
        opened, parts_of = session.stream("GET", url, **given), "iter_bytes"
    else:
        opened, parts_of = session.get(url, stream=True, **given), "iter_content"
    with opened as reply:
        hf_raise_for_status(reply)
        sent = reply.headers.get("Content-Range", "none")
        if reply.status_code != HTTPStatus.PARTIAL_CONTENT or not sent.startswith(f"bytes {span}/"):
            raise ValueError(
                f"bytes {span} were asked for, and a reply of status {reply.status_code} came, "
                f"Content-Range {sent}, Content-Length {reply.headers.get('Content-Length')}"
            )
        body = bytearray()
        for part in getattr(reply, parts_of)(_PART_BYTES):
            body += part
            if len(body) > size:
                break
    if len(body) != size:
        came = len(body) if len(body) < size else f"more than {size}"
        raise ValueError(f"{size} bytes were asked for, and {came} came")
    return bytes(body)


def _shards(folder: Path) -> Sequence[str]:
    """Return the names of a checkpoint's shards. Raises CheckpointError; see read_index.

    folder: has its JSON files alone.
    """
    files = read_index(folder)
    return [SINGLE_FILE] if files is None else sorted(set(files.values()))


def _fetch_shard(read: ReadBytes, path: Path) -> None:
    """Write a shard's header, and the tensors that are read with it, each in its place."""
    length = read(0, LENGTH_BYTES)
    start = LENGTH_BYTES + header_length(length)
    header = read(LENGTH_BYTES, start)
    tensors = {name: (begin, end) for name, (_, _, begin, end) in parse_header(header).items()}
    places = sorted(p for n, p in tensors.items() if n.rpartition(".")[2] == READ_WITH_HEADERS)
    if any(end - begin > _MOST_BYTES for begin, end in places):
        raise ValueError(f"a {READ_WITH_HEADERS} has more than {_MOST_BYTES} bytes")
    joined: list[list[int]] = []
    for begin, end in places:
        if joined and begin - joined[-1][1] <= _NEAR_BYTES:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    size = sum(end - begin for begin, end in joined)
    if size > _MOST_READ_BYTES:
        raise ValueError(f"its {READ_WITH_HEADERS}s are spread over {size} bytes")
    with path.open("wb") as file:
        file.write(length + header)
        file.truncate(start + max(end for _, end in tensors.values()))  # takes no room on the disk
        for begin, end in joined:
            file.seek(start + begin)
            file.write(read(start + begin, start + end))
