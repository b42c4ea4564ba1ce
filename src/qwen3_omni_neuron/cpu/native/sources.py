"""A hash of the C sources: compiled into the library, and compared when it is loaded.

setup.py runs this file before anything is installed, so it imports the standard library alone.
"""

import hashlib
from pathlib import Path


def source_hash(folder: Path) -> str | None:
    """Return 16 hex digits over the names and bytes of the *.c and *.h files in a folder.

    None where the folder has none, as sources may be stripped from an installation.
    """
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")], key=lambda file: file.name)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
