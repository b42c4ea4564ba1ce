"""Every error that the package raises on purpose.

    Qwen3OmniError
    ├── CheckpointError          config.json, shards or parameter names don't fit
    ├── ArtifactError            a compiled tree is missing, incomplete, or doesn't fit
    ├── NotInstalledError        what a target needs is not installed
    ├── CompileError             a graph's compile ended by itself, or another run has the tree
    ├── InputError (ValueError)  what the caller handed in
    │   ├── MessageError         conversation: roles, content, media kinds
    │   ├── AudioError           a clip that can't be read or heard
    │   ├── ImageError           a picture that can't be read or seen
    │   ├── VideoError           a video that can't be read or seen
    │   ├── OptionError          unknown or out-of-range option, unknown speaker
    │   └── PromptTooLongError   more tokens than the KV cache holds
    ├── BucketError (ValueError) a call of a size that no engine was compiled for
    ├── BusyError                every slot is in use, and the queue is full
    ├── LateError (TimeoutError) a deadline of the request has passed
    ├── ClosedError              the model was closed
    ├── EngineDiedError          a process that ran a part of the model ended by itself
    └── OutputError (OSError)    a file that can't be written

A message says what happened, the numbers, and what to do next.
"""


class Qwen3OmniError(Exception):
    """Base of every error of this package."""


class CheckpointError(Qwen3OmniError):
    """The checkpoint is missing, broken, or not a Qwen3-Omni one."""


class ArtifactError(Qwen3OmniError):
    """A compiled tree is missing, incomplete, broken, or of something else."""


class NotInstalledError(Qwen3OmniError):
    """Packages that a target needs are not installed."""


class CompileError(Qwen3OmniError):
    """The compile of a graph ended by itself, or another run is compiling into the same folder."""


class InputError(Qwen3OmniError, ValueError):
    """The caller's input can't be used."""


class MessageError(InputError):
    """The conversation is malformed."""


class AudioError(InputError):
    """An audio clip can't be read, or holds nothing that can be heard."""


class ImageError(InputError):
    """A picture can't be read, or is of a shape that the encoder can't see."""


class VideoError(InputError):
    """A video can't be read, has no frames, or is of a shape that the encoder can't see."""


class OptionError(InputError):
    """An option is unknown or out of its range."""


class PromptTooLongError(InputError):
    """The prompt, or a sound in it, needs more positions than the KV cache has."""


class BucketError(Qwen3OmniError, ValueError):
    """A call is of a size that the engine was not compiled for."""


class BusyError(Qwen3OmniError):
    """Every slot is in use by another request, and as many as may are waiting for one."""


class LateError(Qwen3OmniError, TimeoutError):
    """A request's first token, or what comes next, took longer than its deadline allows."""


class ClosedError(Qwen3OmniError):
    """The model was closed."""


class EngineDiedError(Qwen3OmniError):
    """A process that ran a part of the model ended by itself. The model has to be loaded again."""


class OutputError(Qwen3OmniError, OSError):
    """An output file can't be written."""


_LONGEST_SAID = 100  # characters


def said(value: object) -> str:
    """Return a value as a message shows it: short, printable, whatever its own repr does."""
    try:
        text = repr(value)
    except Exception:  # too deep, too many digits, or the object's own
        return f"a {type(value).__name__}"
    return printable(text, _LONGEST_SAID)


def printable(text: str, longest: int) -> str:
    """Return the beginning of a text, with escapes for what no terminal or file could show: halves
    of surrogate pairs, control characters, marks that reverse the direction of writing."""
    kept = text[:longest]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return shown if len(text) <= longest else f"{shown}..."
