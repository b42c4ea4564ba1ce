"""Files without a name that processes share: memory where the system can, else temporary files."""

import os
import sys
import tempfile
from typing import BinaryIO


def nameless_file() -> BinaryIO:
    """Return a new, empty file, unbuffered; on Linux it may be sealed.

    The kernel frees it when the last process that has it open or mapped ends, in whatever way.
    """
    if sys.platform == "linux":
        # Not in /dev/shm, which a container often limits to 64 MiB.
        descriptor = os.memfd_create("qwen3-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, it is kept
    return file
