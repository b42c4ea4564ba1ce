"""Messages between two processes, with tensors and arrays in shared memory.

A message on the socket: bytes that follow the header (uint64), number of buffers (uint32), size of
each buffer (uint64), the pickle. The data of tensors and arrays (the buffers) are in a block of
shared memory that the sender writes, one after another, each at a multiple of 64 bytes. Small
buffers stay in the pickle.
"""

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.process.child import nameless_file

FIRST_BYTES = 1 << 20  # size of a new block
KEPT_BYTES = 16 << 20  # memory that a block keeps after larger messages
ALIGNMENT = 64
RECEIVE_BYTES = 1 << 16
INLINE_BYTES = 1 << 14  # a buffer up to this size is faster in the pickle; a row of logits is one
# Types that numpy lacks, and the integer types of the same size that they are sent as.
SENT_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
HEADER = struct.Struct("<QI")


class DisconnectedError(Exception):
    """The connection has ended, at this end or the other."""


class Mailbox:
    """One end of a connection that carries one message at a time.

    Each message must be received before the next one is sent, because its buffers are in the block
    until then. A message is any object that can be pickled. Tensors arrive as copies that own their
    memory, contiguous, on the host and without a gradient. Used by one thread at a time.
    """

    def __init__(
        self, connection: socket.socket, incoming: "SharedBlock", outgoing: "SharedBlock"
    ) -> None:
        self._socket = connection
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, message: object) -> None:
        """Send a message.

        Raises DisconnectedError, and pickling errors before anything is sent.
        """
        self.post(self.pack(message))

    def pack(self, message: object) -> bytes:
        """Put a message's buffers into the outgoing block, and return the bytes to post.

        They may be posted to every mailbox that shares the block. Raises pickling errors.
        """
        pickled, buffers = _pickle(message)
        sizes = [buffer.nbytes for buffer in buffers]
        offsets, total = _layout(sizes)
        block = self._outgoing.for_message(total)
        for buffer, offset in zip(buffers, offsets, strict=True):
            block[offset : offset + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        size_table = struct.pack(f"<{len(sizes)}Q", *sizes)
        header = HEADER.pack(len(size_table) + len(pickled), len(sizes))
        return b"".join((header, size_table, pickled))

    def post(self, packed: bytes) -> None:
        """Send a packed message. Raises DisconnectedError."""
        try:
            self._socket.sendall(packed)
        except ConnectionError:
            raise DisconnectedError from None

    def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises DisconnectedError, and unpickling errors; then the message has been received whole,
        and the connection can still be used.
        """
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
            # torch's memory is aligned. Some kernels round differently where it is not, and an
            # engine must compute the same numbers in every process.
            buffer = torch.empty(size, dtype=torch.uint8).numpy()
            buffer[:] = block[offset : offset + size]
            buffers.append(buffer)
        return pickle.loads(memoryview(data)[HEADER.size + 8 * count :], buffers=buffers)

    def fileno(self) -> int:
        """Return the descriptor of the socket, to wait on."""
        return self._socket.fileno()

    def disconnect(self) -> None:
        """End the connection at both ends, and wake a thread that waits. Any thread may call it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end has disconnected already

    def close(self) -> None:
        """Close the socket and both blocks."""
        self._socket.close()
        self._incoming.close()
        self._outgoing.close()

    def _some_bytes(self) -> bytes:
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            raise DisconnectedError
        return received


class SharedBlock:
    """Block of memory that two processes share: a mapped file without a name, which can grow.

    The kernel frees such a file when the last process that has it open ends, in whatever way. A
    multiprocessing.shared_memory block has a name that somebody must unlink, and can't grow.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = self._map()

    @classmethod
    def create(cls) -> "SharedBlock":
        """Create a block of FIRST_BYTES."""
        file = nameless_file()
        os.ftruncate(file.fileno(), FIRST_BYTES)
        return cls(file)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> "SharedBlock":
        """Open the block that another process created, by a descriptor inherited from it."""
        return cls(os.fdopen(descriptor, "r+b", buffering=0))

    def at_least(self, size: int) -> NDArray[np.uint8]:
        """Return the bytes of the block, after growing it to at least `size`.

        After that, arrays returned earlier are no longer the block's memory.
        """
        if size > len(self._bytes):
            if size > os.fstat(self.fileno()).st_size:  # else the other process has grown it
                os.ftruncate(self.fileno(), max(size, 2 * len(self._bytes)))
            self._bytes = self._map()
        return self._bytes

    def for_message(self, size: int) -> NDArray[np.uint8]:
        """Return the bytes of the block for a new message; see `at_least`.

        Memory that an earlier, larger message took beyond KEPT_BYTES goes back to the system.
        """
        if size <= KEPT_BYTES < len(self._bytes):
            # A reader's longer mapping stays valid: it reads no more than the message.
            os.ftruncate(self.fileno(), KEPT_BYTES)
            self._bytes = self._map()
        return self.at_least(size)

    def fileno(self) -> int:
        """Return the descriptor of the file, which another process can inherit."""
        return self._file.fileno()

    def close(self) -> None:
        """Unmap and close the file."""
        self._bytes = np.empty(0, np.uint8)
        self._file.close()

    def _map(self) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.uint8)


class _Pickler(pickle.Pickler):
    """Pickler that passes the bytes of tensors and arrays to the buffer callback."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            integer = SENT_AS.get(obj.dtype)
            data = obj if integer is None else obj.view(integer)
            raw = np.ascontiguousarray(data.numpy(force=True))
            return _tensor, (pickle.PickleBuffer(raw.data), obj.dtype, tuple(obj.shape))
        if isinstance(obj, np.ndarray) and not obj.flags.forc:
            # numpy would copy the bytes of an array that is not contiguous into the pickle.
            return np.ascontiguousarray(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickle(message: object) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep_inline(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= INLINE_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=keep_inline).dump(message)
    return stream.getvalue(), buffers


def _tensor(
    raw: NDArray[np.uint8] | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=dtype).view(shape)
    # Bytes in the pickle may be unaligned: see Mailbox.receive.
    return tensor.clone() if isinstance(raw, bytearray) else tensor


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each buffer in the block, and the end of the last one."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
