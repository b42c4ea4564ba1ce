"""Sentences that Pillow's libtiff says about a file and would write to the standard error."""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator

_CHARACTERS = 200  # most of a sentence
# A file that is damaged has a sentence a line of its pixels.
_MOST_SAID = 3
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
"""libtiff's TIFFErrorHandler (module, format, va_list). A va_list is passed as a pointer."""


@contextlib.contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Add the first sentences that libtiff says in this thread to `said`.

    Must not be entered by two threads at once: libtiff has one function for all. Does nothing where
    Pillow has no libtiff whose functions can be found.
    """
    from PIL import _imaging

    # Python writes what this logger says to the standard error where no one listens to it.
    pillow = logging.getLogger("PIL")
    if not pillow.handlers:
        pillow.addHandler(logging.NullHandler())
    try:
        # Also the names of the libraries that it is linked with are found in it.
        functions = ctypes.CDLL(_imaging.__file__)
        setters = functions.TIFFSetErrorHandler, functions.TIFFSetWarningHandler
    except (OSError, AttributeError, TypeError):
        yield
        return
    written = ctypes.CDLL(None).vsnprintf
    thread, left = threading.get_ident(), len(said) + _MOST_SAID

    def note(module: bytes | None, form: bytes, values: int | None) -> None:
        if threading.get_ident() != thread or len(said) >= left:
            return
        text = ctypes.create_string_buffer(_CHARACTERS)
        written(text, ctypes.c_size_t(_CHARACTERS), form, ctypes.c_void_p(values))
        sentence = b": ".join(filter(None, (module, text.value)))
        said.append(sentence.decode(errors="replace").strip().rstrip("."))

    handler = _Handler(note)
    before = []
    for setter in setters:
        setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
        before.append(setter(ctypes.cast(handler, ctypes.c_void_p)))
    try:
        yield
    finally:
        for setter, earlier in zip(setters, before, strict=True):
            setter(earlier)
