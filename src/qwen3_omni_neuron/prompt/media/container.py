"""Media file with streams -> an open PyAV container, without access to anything but the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.prompt.media.fields import Source, name_of, open_media

if TYPE_CHECKING:
    from av.container import InputContainer


class _Nameless:
    """File object without a name, so that FFmpeg finds the format from the content alone."""

    def __init__(self, file: BinaryIO):
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


@contextmanager
def opened(
    source: Source, where: str, kind: str, error: type[InputError], form: str | None = None
) -> "Iterator[InputContainer]":
    """Open a file with PyAV, and close it afterwards.

    kind: what is wanted of it, "audio" or "video". form: FFmpeg's name of the format; None: found
    from the content. Raises `error`, which begins with `where`, when PyAV is not installed or the
    file can't be opened, and for PyAV's errors inside the context.
    """
    try:
        import av
    except ImportError as reason:
        instead = {"audio": "send WAV, FLAC, OGG or MP3", "video": "give frames, with their fps"}
        raise error(
            f"{where} is {kind} in a file that PyAV decodes, and it isn't installed. "
            f"Run: pip install 'qwen3-omni-neuron[video]'; or {instead[kind]}."
        ) from reason
    # FFmpeg also reads playlists, which name other files, on this machine or another. With no
    # protocol allowed it can't open those; the file object that we opened needs none.
    options = {"protocol_whitelist": ""}
    with open_media(source, where, error) as file:
        try:
            with av.open(
                _Nameless(file), "r", form, options=options, metadata_errors="replace"
            ) as container:
                yield container
        except InputError:
            raise
        # ValueError and ArithmeticError come from PyAV, and from arithmetic with the file's
        # numbers.
        except (av.FFmpegError, ValueError, ArithmeticError) as reason:
            raise error(
                f"{where}: {name_of(source)} can't be decoded as {kind}; it is something else, "
                f"broken or cut short ({reason}). Export it again."
            ) from reason


def no_decoder(where: str, source: Source, kind: str, error: type[InputError]) -> InputError:
    """Return the error for a stream whose codec can't be decoded. kind: "audio" or "video"."""
    return error(
        f"{where}: the {kind} of {name_of(source)} is of a codec that FFmpeg has no decoder for "
        "here. Export it with another one, such as H.264 and AAC."
    )
