"""Every error that the package raises on purpose.

    Qwen3OmniError
    ├── CheckpointError          config.json, shards or parameter names don't fit
    ├── InputError (ValueError)  what the caller handed in
    │   ├── MessageError         conversation: roles, content, media kinds
    │   ├── AudioError           a clip that can't be read or heard
    │   ├── OptionError          unknown or out-of-range option, unknown speaker
    │   └── PromptTooLongError   more tokens than the KV cache holds
    ├── BusyError                every slot is in use
    ├── ClosedError              the model was closed
    └── OutputError (OSError)    a file that can't be written

A message says what happened, the numbers, and what to do next.
"""


class Qwen3OmniError(Exception):
    """Base of every error of this package."""


class CheckpointError(Qwen3OmniError):
    """The checkpoint is missing, broken, or not a Qwen3-Omni one."""


class InputError(Qwen3OmniError, ValueError):
    """The caller's input can't be used."""


class MessageError(InputError):
    """The conversation is malformed."""


class AudioError(InputError):
    """An audio clip can't be read, or holds nothing that can be heard."""


class OptionError(InputError):
    """An option is unknown or out of its range."""


class PromptTooLongError(InputError):
    """The prompt needs more positions than the KV cache has."""


class BusyError(Qwen3OmniError):
    """Every slot is in use by another request."""


class ClosedError(Qwen3OmniError):
    """The model was closed."""


class OutputError(Qwen3OmniError, OSError):
    """An output file can't be written."""
