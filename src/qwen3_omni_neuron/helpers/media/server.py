"""The fork server of the decoders: it has loaded the codecs, so that no child has to."""

import contextlib
import importlib
from typing import Any

from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.media import work

NICENESS = 5


def main(control: int, parent: int) -> None:
    """Serve until the pool disconnects; see helpers.fork_server.serve."""
    serve(control, parent, NICENESS, prepare)


def prepare() -> Run:
    """Load the codecs; return what a child does."""
    load_codecs()
    return work.run


def load_codecs() -> None:
    """Import the codecs, so that no child has to."""
    from PIL import Image

    Image.init()
    for name in ("soundfile", "soxr", "av"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Image.MAX_IMAGE_PIXELS = None  # each job has its own limit
    with contextlib.suppress(ImportError):  # Pillow before 11.3
        avif: Any = importlib.import_module("PIL.AvifImagePlugin")
        # By default a thread a core: on a large machine their stacks exceed a child's memory.
        avif.DEFAULT_MAX_THREADS = work.THREADS
