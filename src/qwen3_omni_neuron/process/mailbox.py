"""Messages between two processes: what is large in them through shared memory, the rest through a
socket.

On the socket: how many bytes follow the header (uint64), how many buffers there are (uint32), each
one's size (uint64), the pickle. In the sender's block: the buffers of tensors and arrays, one after
the other, each on a multiple of 64 bytes. Small ones stay in the pickle.
"""

import io
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIRST_BYTES = 1 << 20


class SharedBlock:
    """The bytes of a file that has no name, mapped by whoever holds its descriptor.

    A file without a name needs no one to unlink it: the kernel frees it with its last holder,
    however that ends. And it can grow in place, which a multiprocessing.shared_memory block can't.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = self._map()

    @classmethod
    def create(cls) -> "SharedBlock":
        """A new one of FIRST_BYTES."""
        if sys.platform == "linux":
            # Not in /dev/shm, which a container often limits to 64 MiB.
            file = os.fdopen(os.memfd_create("qwen3-omni"), "r+b", buffering=0)
        else:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, it is kept
        os.ftruncate(file.fileno(), FIRST_BYTES)
        return cls(file)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> "SharedBlock":
        """The one that another process created, by a descriptor inherited from it."""
        return cls(os.fdopen(descriptor, "r+b", buffering=0))

    def at_least(self, size: int) -> NDArray[np.uint8]:
        """The block's bytes, `size` of them or more: it grows first where it is smaller.

        The array is no longer the block after a call that asks for more.
        """
        if size > len(self._bytes):
            if size > os.fstat(self.fileno()).st_size:  # else the other process has grown it
                os.ftruncate(self.fileno(), max(size, 2 * len(self._bytes)))
            self._bytes = self._map()
        return self._bytes

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._file.close()

    def _map(self) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.uint8)


ALIGNMENT = 64
RECEIVE_BYTES = 1 << 16
INSIDE_BYTES = 1 << 14  # a buffer up to here is quicker in the pickle: a row of logits is
# What numpy has no name for, and the integers of its size that it travels as.
NAMELESS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
HEADER = struct.Struct("<QI")


class HungUpError(Exception):
    """The other end of the connection is gone."""


class Mailbox:
    """One end of a connection. The two ends take turns: each message is received before the next
    one is sent, since it stands in the block until then.

    A message is any object that can be pickled. Tensors arrive as copies that own their memory,
    contiguous, on the host and without a gradient. Used by one thread at a time.
    """

    def __init__(
        self, connection: socket.socket, incoming: SharedBlock, outgoing: SharedBlock
    ) -> None:
        self._socket = connection
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, message: object) -> None:
        """Raises HungUpError, and what pickling the message raises, before anything is sent."""
        pickled, buffers = _pickle(message)
        sizes = [buffer.nbytes for buffer in buffers]
        offsets, total = _layout(sizes)
        block = self._outgoing.at_least(total)
        for buffer, offset in zip(buffers, offsets, strict=True):
            block[offset : offset + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        size_table = struct.pack(f"<{len(sizes)}Q", *sizes)
        header = HEADER.pack(len(size_table) + len(pickled), len(sizes))
        try:
            self._socket.sendall(b"".join((header, size_table, pickled)))
        except ConnectionError:
            raise HungUpError from None

    def receive(self) -> Any:
        """The next message. Raises HungUpError, and what unpickling the message raises, which is
        off the connection then."""
        data = bytearray(self._some_bytes())
        while len(data) < HEADER.size:
            data += self._some_bytes()
        rest, count = HEADER.unpack_from(data)
        while len(data) < HEADER.size + rest:
            data += self._some_bytes()
        sizes = struct.unpack_from(f"<{count}Q", data, HEADER.size)
        offsets, total = _layout(sizes)
        block = self._incoming.at_least(total)
        buffers = []
        for offset, size in zip(offsets, sizes, strict=True):
            # torch's memory, which is aligned: some kernels round differently where it is not,
            # and an engine is to compute what it computes in its caller's process.
            buffer = torch.empty(size, dtype=torch.uint8).numpy()
            buffer[:] = block[offset : offset + size]
            buffers.append(buffer)
        return pickle.loads(memoryview(data)[HEADER.size + 8 * count :], buffers=buffers)

    def fileno(self) -> int:
        """Of the socket, to wait on."""
        return self._socket.fileno()

    def hang_up(self) -> None:
        """End the connection, at both ends and in whatever thread waits on it. Any thread's."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        self._socket.close()
        self._incoming.close()
        self._outgoing.close()

    def _some_bytes(self) -> bytes:
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            raise HungUpError
        return received


class _Pickler(pickle.Pickler):
    """Hands the bytes of tensors and arrays to the buffer callback."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            integer = NAMELESS.get(obj.dtype)
            data = obj if integer is None else obj.view(integer)
            raw = np.ascontiguousarray(data.numpy(force=True))
            return _tensor, (pickle.PickleBuffer(raw.data), obj.dtype, tuple(obj.shape))
        if isinstance(obj, np.ndarray) and not obj.flags.forc:
            # What numpy does not see as one run of bytes it puts into the pickle.
            return np.ascontiguousarray(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickle(message: object) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= INSIDE_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=keep_inside).dump(message)
    return stream.getvalue(), buffers


def _tensor(
    raw: NDArray[np.uint8] | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=dtype).view(shape)
    # What stood in the pickle may not be aligned: see Mailbox.receive.
    return tensor.clone() if isinstance(raw, bytearray) else tensor


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins in the block, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
