"""Digest and declarations of the C sources, for the build and the check at loading.

setup.py runs this file before installation, so it imports no other module.
"""

import hashlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def source_digest(folder: Path = HERE) -> int | None:
    """Return a 60-bit digest of a folder's C files; None if they were stripped."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")], key=lambda file: file.name)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return int(digest.hexdigest()[:15], 16)


def declarations(folder: Path = HERE) -> Any:
    """Return a cffi.FFI that writes the module `_declarations`: library.h and SOURCE_DIGEST."""
    from cffi import FFI

    lines = (folder / "library.h").read_text(encoding="utf-8").splitlines()
    ffi = FFI()
    ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
    ffi.cdef(f"#define SOURCE_DIGEST {source_digest(folder)}")
    ffi.set_source("qwen3_omni_neuron.cpu.native._declarations", None)
    return ffi
