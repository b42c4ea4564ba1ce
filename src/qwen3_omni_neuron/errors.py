"""Errors of the package. A message says what happened, the numbers, and what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of a verb of the command line; docs/options.md has the table for users."""

    OK = 0
    FAILED = 1
    """An error, described on stderr; or `verify` found a difference."""
    WRONG_COMMAND_LINE = 2
    """Wrong arguments: argparse's status."""
    CUT = 3
    """A limit ended a text or its speech; the output until then is written."""
    MODEL_DIED = 70
    """A process or thread of a served model died; a supervisor may restart it."""
    INTERRUPTED = 130
    """Ctrl-C: 128 + SIGINT."""
    UNREAD = 141
    """The output's reader has gone: 128 + SIGPIPE."""
    TERMINATED = 143
    """128 + SIGTERM."""


class Qwen3OmniError(Exception):
    """Base of every error of this package."""


class CheckpointError(Qwen3OmniError):
    """The checkpoint is missing, broken, or not a Qwen3-Omni one."""


class ArtifactError(Qwen3OmniError):
    """A compiled tree is missing, incomplete or broken, or does not fit the checkpoint."""


class NotInstalledError(Qwen3OmniError):
    """Packages that a target needs are missing."""


class CompileError(Qwen3OmniError):
    """A compile failed, or another one is writing into the same folder."""


class InputError(Qwen3OmniError, ValueError):
    """The caller's input can't be used."""


class MessageError(InputError):
    """The conversation is malformed."""


class AudioError(InputError):
    """An audio clip can't be read, or has too few samples to encode."""


class ImageError(InputError):
    """An image can't be read, or the vision encoder doesn't accept its shape."""


class VideoError(InputError):
    """A video can't be read, has no frames, or the encoder doesn't accept its shape."""


class OptionError(InputError):
    """An option is unknown or out of range."""


class PromptTooLongError(InputError):
    """The prompt, or an audio clip in it, needs more positions than the KV cache has."""


class StoredSessionError(InputError):
    """A stored session is damaged, or of another checkpoint or format."""


class BucketError(Qwen3OmniError, ValueError):
    """The engine was not compiled for a call's size."""


class BusyError(Qwen3OmniError):
    """Every slot is in use, and the queue for slots is full."""


class GrammarError(Qwen3OmniError):
    """A reply's grammar became too complex to follow."""


class ToolCallError(Qwen3OmniError):
    """A reply's tool call is malformed; none of it was passed on."""


class LateError(Qwen3OmniError, TimeoutError):
    """A request's first token, or a later token, frame or chunk, missed its deadline."""


class ClosedError(Qwen3OmniError):
    """The model or the session was closed."""


class ForkError(Qwen3OmniError):
    """This process was forked from one that had loaded a model. Use spawn, or load only here."""


class EngineError(Qwen3OmniError):
    """A stage computed NaN or infinity for a request, which ends."""

    @staticmethod
    def not_finite(stage: str, step: str) -> "EngineError":
        """Describe the stage and the step whose result is not finite."""
        return EngineError(
            f"The {stage} computed NaN or infinity for {step}. Check the checkpoint and the "
            "adapters: qwen3-omni-neuron verify names the first call that returns them."
        )


class EngineDiedError(Qwen3OmniError):
    """A process or thread that ran a part of the model died: load the model again."""


class OutputError(Qwen3OmniError, OSError):
    """An output (file, server address, loudspeaker) can't be used."""


_MAX_VALUE_CHARACTERS = 100
_MOST_COMPARED = 40  # characters of an unknown name


def format_value(value: object) -> str:
    """Return a value as short printable text for a message."""
    try:
        text = repr(value)
    except Exception:  # too deep, too many digits, or the object's repr raised
        return f"a {type(value).__name__}"
    return printable(text, _MAX_VALUE_CHARACTERS)


# Other libraries' names of options.
_SYNONYMS = {
    "device": ("target", "compiled"),
    "max_tokens": ("max_new_tokens", "thinker_max_new_tokens", "talker_max_new_tokens"),
    "target": ("compiled",),
    "torch_dtype": ("dtype",),
    "voice": ("speaker",),
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask whether a synonym or the nearest known name was meant; empty if there is none."""
    text, names = str.__str__(name)[:_MOST_COMPARED], [*known]
    plain = text.lstrip("-").replace("-", "_")
    meant = (*_SYNONYMS.get(plain, ()), f"thinker_{plain}", f"talker_{plain}")
    found = [n for m in meant for n in names if n.lstrip("-").replace("-", "_") == m]
    near = found or get_close_matches(text, names, 1)
    return f" Did you mean {near[0]}?" if near else ""


def printable(text: str, longest: int) -> str:
    """Return the beginning of a text, with escapes for unprintable characters."""
    kept = text[:longest]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return shown if len(text) <= longest else f"{shown}..."


# Names of the last release, and their replacements: values complete "NAME was removed: ...".
# Emptied at the next release.
_SPILLED = "a conversation that lost its slot is prefilled again; raise max_concurrency"

_NO_SESSION_FOLDER = "a server keeps realtime sessions in memory, while they are open"
REMOVED_OPTIONS: dict[str, str] = {
    "session_folder": _NO_SESSION_FOLDER,
    "session_keys": _NO_SESSION_FOLDER,
    "max_session_folder_bytes": _NO_SESSION_FOLDER,
    "kept_session_s": _NO_SESSION_FOLDER,
    "spill_bytes": _SPILLED,
    "spill_folder": _SPILLED,
    "spill_folder_bytes": _SPILLED,
    "compact": "leave it out: matrices are stored in 12 bits per value wherever that is lossless",
    "kv_cache_dtype": "leave it out: KV caches are in the dtype of the arithmetic",
    "max_bodies_bytes": "use max_held_bytes, which also counts decoded media and sessions.",
    "qwen3_omni_neuron.fleet.application:build": "set import_path to "
    "qwen3_omni_neuron.serving.fleet.application:build.",
    "max_connections": "a proxy limits connections, in nginx by limit_conn (deploy/proxy)",
    "send_timeout_s": "a proxy disconnects clients that do not read, in nginx by send_timeout",
}
"""Keyword arguments, and server settings."""

REMOVED_FLAGS: dict[str, str] = {
    "--by-layer": "the page names the stage and the row; load with dtype float32 to narrow it",
    "--translate": 'ask for a translation: speak "Translate this into English." --audio FILE',
    "--resume": "leave it out: an interrupted compile always resumes.",
}
"""Flags that belong to no option."""

REMOVED_VERBS: dict[str, str] = {
    "completion": "run `shtab -s bash qwen3_omni_neuron.cli.make_parser`, of PyPI's shtab.",
    "pull": "use `aws s3 sync`, `hf download`, a volume or an init container. See docs/fleet.md.",
    "push": "use `aws s3 sync`, `hf upload` or a volume. See docs/fleet.md.",
    "talk": "use the page of `serve`, or any client of the OpenAI Realtime API.",
    "tiny-checkpoint": "use testing.tiny.write_tiny_checkpoint in a checkout.",
}
"""Verbs of the command line."""

REMOVED_FIELDS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("input_audio_format", "output_audio_format", "input_audio_transcription"),
            *("input_audio_noise_reduction", "max_response_output_tokens"),
        ),
        "OpenAI ended its Realtime API's beta; send session.audio and max_output_tokens",
    ),
    "session.resume": "begin another session and send its items again",
    "resume_token": "begin another session and send its items again",
}
"""Fields and values of request bodies and of realtime events."""

REMOVED_PATHS: dict[str, str] = {
    "/v1/audio/translations": "ask for a translation in a message with the sound, in "
    "/v1/chat/completions."
}
"""Paths of the server."""


def removed(name: str, table: dict[str, str]) -> str:
    """Return the sentence that refuses a removed name; empty for other names."""
    sentence = f"{name} was removed: {table.get(name, '').rstrip('.')}."
    return sentence if name in table else ""
