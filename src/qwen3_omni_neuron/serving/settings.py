"""Settings of a server. Each is a field with its default, bounds, meaning, and flag of `serve`.

The flags of `serve`, the `args` of a Ray application and a table of docs/serving.md are made from
these fields. The command line imports this module early, so it needs no other package.
"""

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from qwen3_omni_neuron.errors import OptionError, format_value
from qwen3_omni_neuron.options import (
    FROM_1,
    LOAD_OPTIONS,
    SECONDS,
    Option,
    ValueRange,
    from_,
    option,
    options_of,
)

MIB, GIB = 1 << 20, 1 << 30
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
"""Hosts that only this machine can reach."""
KEYS_VARIABLE = "QWEN3_OMNI_API_KEYS"
"""Environment variable with the API keys of `serve`, with commas between them."""
SLOTS = 8
"""Requests that a model runs at a time by default."""
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
_SHARE = ValueRange("a number above 0 and at most 1", lambda value: 0 < value <= 1)
_PORT = ValueRange("an integer from 0 to 65535", lambda value: 0 <= value <= 65535)
_RETRY, _FULL, _CUT = "429, Retry-After", "503, Retry-After", "the connection is cut"


def name_of_model(model: str) -> str:
    """Return the default name of a model in requests: the folder's name, or the hub id."""
    return Path(model).resolve().name if Path(model).exists() else model


def load_option(name: str, answer: str = "", **given: Any) -> Any:
    """Return the field of an option of a load. given: another default than the option's."""
    load = LOAD_OPTIONS[name]
    default, metavar = given.get("default", load.default), load.metavar or "N"
    return option(default, load.help, load.values, answer, shown=load.shown, metavar=metavar)


class Settings:
    """Base of frozen dataclasses of settings: each value is checked by its field's annotation.

    A number of a float's field becomes one, a list a tuple, and a text a path. A wrong value
    raises OptionError.
    """

    def __post_init__(self) -> None:
        declared = options_of(type(self))
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            value = _converted(kind, name, getattr(self, name))
            if name in declared:
                declared[name].check(value)
            object.__setattr__(self, name, value)


def _converted(kind: Any, name: str, value: Any) -> Any:
    """Return a value as its annotation has it. Raises OptionError."""
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _converted(get_args(kind)[0], name, value)
    if get_origin(kind) is Annotated:
        kind, convert = get_args(kind)
        return convert(name, _converted(kind, name, value))
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise OptionError(f"{name} must be a list, got {format_value(value)}.")
        return tuple(_converted(get_args(kind)[0], name, one) for one in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = _WORDS.get(kind, kind.__name__)
        raise OptionError(f"{name} must be {words}, got {format_value(value)}.")
    return value


def _origin(_: str, url: str) -> str:
    """Return an origin as browsers send it."""
    return url.lower().rstrip("/")


def _host_name(setting: str, name: str) -> str:
    if not name or any(mark in name for mark in "/:@ "):
        raise OptionError(
            f"{setting} has names alone, such as example.org, without scheme and port; got "
            f"{format_value(name)}."
        )
    return name


def _alias(setting: str, text: str) -> str:
    name, mark, voice = (part.strip() for part in text.partition("="))
    if not (name and mark and voice):
        raise OptionError(
            f"{setting} has NAME=VOICE, such as marin=Chelsie; got {format_value(text)}."
        )
    return f"{name}={voice}"


def _model_name(setting: str, name: str) -> str:
    if not name or not name.isprintable():
        raise OptionError(
            f"{setting} must be a name of characters that can be printed, got {format_value(name)}."
        )
    return name


@dataclass(frozen=True)
class Limits(Settings):
    """Limits and deadlines of one server, alone or a replica in a Ray cluster."""

    model_name: Annotated[str, _model_name] = option(
        "qwen3-omni",
        "name of the model in requests",
        metavar="NAME",
        shown="the folder's, or the hub id",
    )
    voice_aliases: tuple[Annotated[str, _alias], ...] = option(
        (),
        "another name of a voice, such as marin=Chelsie, before those that OpenAI's voices have; "
        "repeatable",
        flag="--voice-alias",
        metavar="NAME=VOICE",
        shown="none",
    )
    max_concurrency: int | None = load_option("max_concurrency", _RETRY)
    max_queued: int = load_option("max_queued", _RETRY, default=64)
    context_length: int | None = load_option("context_length", "400")
    requests_per_minute: int | None = option(
        None,
        "requests a minute of one key, or of one address without keys",
        FROM_1,
        _RETRY,
        shown="any number",
    )
    owner_share: float | None = option(
        None,
        "share of all bytes, requests and realtime sessions that one key may have, or one address "
        "without keys",
        _SHARE,
        _RETRY,
        shown="0.5; 1 with one key, and without keys on loopback",
    )
    allowed_hosts: tuple[Annotated[str, _host_name], ...] = option(
        (),
        "name under which a server without keys may be asked, beside localhost, its addresses and "
        "`--host`; repeatable",
        None,
        "403",
        flag="--allow-host",
        metavar="NAME",
        shown="none",
    )
    allowed_origins: tuple[Annotated[str, _origin], ...] = option(
        (),
        "page of another host that may use the server, such as https://example.org; repeatable",
        None,
        "403",
        flag="--allow-origin",
        metavar="URL",
        shown="none",
    )
    body_timeout_s: float = option(60.0, "time for a request's body", SECONDS, "408")
    request_timeout_s: float = option(900.0, "time of a whole request", SECONDS, "504")
    max_body_bytes: int = option(32 * MIB, "bytes of a request's body", FROM_1, "413")
    max_request_bytes: int = option(
        512 * MIB, "bytes that one request takes in memory, with its media decoded", FROM_1, "413"
    )
    max_held_bytes: int = option(
        GIB, "bytes that all requests and sessions take in memory", FROM_1, _FULL
    )
    max_media: int = option(32, "media items of a request", None, "400")
    max_media_bytes: int = option(24 * MIB, "bytes of one media item", FROM_1, "413")
    max_media_s: float = option(1800.0, "duration of one media item", SECONDS, "400")
    max_pixels: int = option(8192 * 6144, "pixels of an image or a frame", FROM_1, "400")
    decoders: int = option(2, "processes that decode media at a time", FROM_1)
    decoder_bytes: int = option(
        GIB, "memory of one process that decodes media", from_(64 * MIB), "400"
    )
    decode_timeout_s: float = option(30.0, "time to decode one media item", SECONDS, "400")
    media_hosts: tuple[str, ...] = option(
        (),
        "host whose URLs may be fetched for media; repeatable",
        None,
        "400",
        flag="--allow-media-host",
        metavar="HOST",
        shown="none",
    )
    media_timeout_s: float = option(10.0, "time to fetch a URL", SECONDS, "400")
    media_redirects: int = option(3, "redirects of a URL", None, "400", flag=None)
    max_realtime_sessions: int = option(
        64, "realtime sessions that are open at a time", FROM_1, _FULL
    )
    max_realtime_s: float = option(
        3600.0, "duration of a realtime session", SECONDS, "an error event"
    )
    max_realtime_bytes: int = option(
        128 * MIB,
        "bytes of a realtime session's items, and of its sound that is in no item yet",
        FROM_1,
        "an error event",
    )
    kept_replies: int = option(
        1000,
        "spoken replies that a later turn may name by the id of their audio, and as many responses",
        FROM_1,
        "400",
    )
    kept_reply_s: float = option(
        3600.0, "time that a spoken reply is kept, and a response from its last use", SECONDS, "400"
    )
    max_kept_response_bytes: int = option(
        64 * MIB,
        "bytes of responses that a later turn may name, of `--max-held-bytes`",
        FROM_1,
        "400",
    )
    drain_timeout_s: float = option(
        300.0, "time for running requests to end after SIGTERM", SECONDS, "503"
    )
    stall_timeout_s: float = option(
        300.0, "time of one call of an engine; after it /health and /ready say 503", SECONDS, "503"
    )
    log_content: bool = option(False, "write texts of requests and replies to the log")


@dataclass(frozen=True)
class ServerSettings(Limits):
    """Settings of a server that owns its connections and its address."""

    host: str = option("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = option(8000, "port to listen on", _PORT)
    tls_cert: Path | None = option(None, "certificate, for HTTPS", metavar="PEM", shown="none")
    tls_key: Path | None = option(
        None, "private key of the certificate", metavar="PEM", shown="none"
    )
    api_keys: tuple[str, ...] = option(
        (),
        "API keys: a file with one a line",
        None,
        "401",
        metavar="FILE",
        shown=f"those in ${KEYS_VARIABLE}, with commas between them, or else none are needed",
        repr=False,
    )
    header_timeout_s: float = option(10.0, "time for a request's headers", SECONDS, _CUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("TLS needs both --tls-cert and --tls-key.")
        if not all(self.api_keys):
            raise OptionError("an API key is empty.")

    @property
    def share_of_owner(self) -> float:
        """Fraction of all bytes, requests and sessions that one owner may have."""
        if self.owner_share is not None:
            return self.owner_share
        one = len(self.api_keys) == 1 or (not self.api_keys and self.host in LOOPBACK)
        return 1.0 if one else 0.5


def flags() -> dict[str, Option]:
    """Return the settings of `serve` by name, each with its flag."""
    return options_of(ServerSettings)


def default_text(setting: Option) -> str:
    """Return the default of a setting in words, with its unit."""
    if setting.shown != "none" or setting.default in (None, ()):
        return setting.shown
    return _value_text(setting.name, setting.default)


def _value_text(name: str, value: Any) -> str:
    """Return a default with its unit."""
    if name.endswith("_bytes"):
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
    if isinstance(value, bool):
        return "no"
    return f"{value:g} s" if name.endswith("_s") else str(value)
