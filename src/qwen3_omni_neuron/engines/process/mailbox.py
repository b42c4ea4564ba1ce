"""Messages between two processes, with the data of tensors and arrays in shared memory."""

import io
import mmap
import os
import pickle
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.process.child import nameless_file

FIRST_BYTES = 1 << 20  # size of a new block
INLINE_BYTES = 1 << 14  # smaller buffers, such as a row of logits, are faster in the pickle
# Types that numpy lacks -> integer types of the same size.
SENT_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class DisconnectedError(Exception):
    """Either end has disconnected."""


class SharedBlock:
    """Growable unnamed mapped file, shared by processes."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Open the block of an inherited descriptor, or create one."""
        if descriptor is None:
            self._file = nameless_file()
            os.ftruncate(self._file.fileno(), FIRST_BYTES)
        else:
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._bytes = np.empty(0, np.uint8)

    def at_least(self, size: int) -> NDArray[np.uint8]:
        """Return the block's bytes, after growing it to at least `size`."""
        if size > len(self._bytes):
            if size > os.fstat(self.fileno()).st_size:  # else the other process has grown it
                os.ftruncate(self.fileno(), max(size, 2 * len(self._bytes)))
            self._bytes = np.frombuffer(mmap.mmap(self.fileno(), 0), np.uint8)
        return self._bytes

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Unmap and close the file."""
        self._bytes = np.empty(0, np.uint8)
        self._file.close()


class Mailbox:
    """One end of a connection that carries one message at a time.

    A message's buffers are in the block until it is received: the next one must wait. Any picklable
    object is a message. Tensors arrive as contiguous copies on the host, without gradients. Used by
    one thread at a time.
    """

    def __init__(self, end: Connection, incoming: SharedBlock, outgoing: SharedBlock) -> None:
        self._end, self._incoming, self._outgoing = end, incoming, outgoing

    def pack(self, message: object) -> bytes:
        """Copy a message's buffers into the outgoing block; return the bytes to post.

        Every mailbox that shares the block may post them. Raises pickling errors.
        """
        buffers: list[memoryview] = []

        def keep_inline(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes > INLINE_BYTES:
                buffers.append(raw)
            return raw.nbytes <= INLINE_BYTES

        pickled = io.BytesIO()
        _Pickler(pickled, 5, buffer_callback=keep_inline).dump(message)
        sizes = [buffer.nbytes for buffer in buffers]
        block, begin = self._outgoing.at_least(sum(sizes)), 0
        for buffer, size in zip(buffers, sizes, strict=True):
            block[begin : begin + size] = np.frombuffer(buffer, np.uint8)
            begin += size
        return pickle.dumps((sizes, pickled.getvalue()))

    def post(self, packed: bytes) -> None:
        """Send a packed message. Raises DisconnectedError."""
        try:
            self._end.send_bytes(packed)
        except OSError:
            raise DisconnectedError from None

    def receive(self) -> Any:
        """Wait for the next message.

        Raises DisconnectedError, and unpickling errors, which don't end the connection.
        """
        try:
            sizes, pickled = pickle.loads(self._end.recv_bytes())
        except (EOFError, OSError):
            raise DisconnectedError from None
        block, begin = self._incoming.at_least(sum(sizes)), 0
        buffers = []
        for size in sizes:
            # Aligned like torch's memory: otherwise some kernels round differently, and an engine
            # must compute the same numbers in every process.
            buffer = torch.empty(size, dtype=torch.uint8).numpy()
            buffer[:] = block[begin : begin + size]
            begin += size
            buffers.append(buffer)
        return pickle.loads(pickled, buffers=buffers)

    def fileno(self) -> int:
        """Return the connection's descriptor, to wait on."""
        return self._end.fileno()

    def disconnect(self) -> None:
        """End the connection at both ends, and wake a waiting thread. Thread-safe."""
        # OSError: the other end has disconnected.
        with suppress(OSError), socket.socket(fileno=os.dup(self._end.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and both blocks."""
        for part in (self._end, self._incoming, self._outgoing):
            part.close()


class _Pickler(pickle.Pickler):
    """Pickler that passes the bytes of tensors and arrays to the buffer callback."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.layout is torch.strided:
            integer = SENT_AS.get(obj.dtype)
            data = obj if integer is None else obj.view(integer)
            raw = np.ascontiguousarray(data.numpy(force=True))
            return _tensor, (pickle.PickleBuffer(raw.data), obj.dtype, tuple(obj.shape))
        if isinstance(obj, np.ndarray) and not obj.flags.forc:
            # numpy would copy a non-contiguous array's bytes into the pickle.
            return np.ascontiguousarray(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _tensor(
    raw: NDArray[np.uint8] | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=dtype).view(shape)
    # Bytes in the pickle may be unaligned: see Mailbox.receive.
    return tensor.clone() if isinstance(raw, bytearray) else tensor
