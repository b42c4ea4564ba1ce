"""The fork server of the decoders: it has loaded the codecs, so that no child has to."""

import contextlib
import importlib
from typing import Any

from PIL import Image

from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.media import work
from qwen3_omni_neuron.prompt.media.image import readable_formats

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
    readable_formats()
    for name in ("soundfile", "soxr", "av"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Image.MAX_IMAGE_PIXELS = None  # each job has its own limit
    # By default a thread a core: on a large machine their stacks exceed a child's memory.
    with contextlib.suppress(ImportError):  # Pillow before 11.3
        avif: Any = importlib.import_module("PIL.AvifImagePlugin")
        avif.DEFAULT_MAX_THREADS = work.THREADS
    with contextlib.suppress(ImportError):  # not installed
        heif: Any = importlib.import_module("pillow_heif")
        heif.options.DECODE_THREADS = work.THREADS
