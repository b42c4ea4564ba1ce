"""Errors of the package. A message says what happened, the numbers, and what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of a verb of the command line; docs/options.md has the table for users."""

    OK = 0
    FAILED = 1
    """An error, of which a line on stderr says what happened; or `verify` found a difference."""
    WRONG_COMMAND_LINE = 2
    """The status of argparse."""
    CUT = 3
    """A limit ended a text or its speech: all up to there is written."""
    MODEL_DIED = 70
    """A process or thread of a served model has ended, and a supervisor may start it anew."""
    INTERRUPTED = 130
    """Ctrl-C: 128 and the number of SIGINT."""
    UNREAD = 141
    """Nobody reads the output any more: 128 and the number of SIGPIPE."""
    TERMINATED = 143
    """SIGTERM."""


class Qwen3OmniError(Exception):
    """Base of every error of this package."""


class CheckpointError(Qwen3OmniError):
    """The checkpoint is missing, broken, or not a Qwen3-Omni one."""


class ArtifactError(Qwen3OmniError):
    """A compiled tree is missing, incomplete or broken, or does not fit the checkpoint."""


class NotInstalledError(Qwen3OmniError):
    """Packages that a target needs are not installed."""


class CompileError(Qwen3OmniError):
    """The compile of a model ended by itself, or another run is writing into the same folder."""


class InputError(Qwen3OmniError, ValueError):
    """The caller's input can't be used."""


class MessageError(InputError):
    """The conversation is malformed."""


class AudioError(InputError):
    """An audio clip can't be read, or has too few samples to encode."""


class ImageError(InputError):
    """An image can't be read, or has a shape that the vision encoder does not take."""


class VideoError(InputError):
    """A video can't be read, has no frames, or has a shape that the encoder does not take."""


class OptionError(InputError):
    """An option is unknown or out of its range."""


class PromptTooLongError(InputError):
    """The prompt, or an audio clip in it, needs more positions than the KV cache has."""


class StoredSessionError(InputError):
    """A stored session can't be used: it is damaged, or of another checkpoint or format."""


class BucketError(Qwen3OmniError, ValueError):
    """A call is of a size that the engine was not compiled for."""


class BusyError(Qwen3OmniError):
    """Every slot is in use, and the queue for slots is full."""


class GrammarError(Qwen3OmniError):
    """A reply can't go on within its grammar, which became too complex to follow."""


class ToolCallError(Qwen3OmniError):
    """A reply's call of a tool is malformed; nothing of it was passed on."""


class LateError(Qwen3OmniError, TimeoutError):
    """A request's first token, or a later token, frame or chunk, missed its deadline."""


class ClosedError(Qwen3OmniError):
    """The model or the session was closed."""


class ForkError(Qwen3OmniError):
    """This process was forked from one that had loaded a model: use spawn, or load here alone."""


class EngineDiedError(Qwen3OmniError):
    """A process or thread that ran a part of the model has ended: load the model again."""


class OutputError(Qwen3OmniError, OSError):
    """An output can't be used: a file, a server's address, a loudspeaker."""


_MAX_VALUE_CHARACTERS = 100
_MOST_COMPARED = 40  # characters of an unknown name that are compared with known ones


def format_value(value: object) -> str:
    """Return a value as short printable text for a message, whatever its own repr does."""
    try:
        text = repr(value)
    except Exception:  # too deep, too many digits, or an error of the object's own
        return f"a {type(value).__name__}"
    return printable(text, _MAX_VALUE_CHARACTERS)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name nearest to an unknown one, or an empty text."""
    near = get_close_matches(str.__str__(name)[:_MOST_COMPARED], [*known], 1)
    return f" Did you mean {near[0]}?" if near else ""


def printable(text: str, longest: int) -> str:
    """Return the beginning of a text, with escapes for characters that no terminal can show."""
    kept = text[:longest]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return shown if len(text) <= longest else f"{shown}..."
