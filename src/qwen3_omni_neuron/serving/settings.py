"""Settings of a server. Each is a field with its default, bounds, meaning, and flag of `serve`.

The flags of `serve`, the `args` of a Ray application and a table of docs/serving.md are made from
these fields. The command line imports this module early, so it needs no other package.
"""

import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from qwen3_omni_neuron.errors import OptionError, format_value
from qwen3_omni_neuron.options import LOAD_OPTIONS

MIB, GIB = 1 << 20, 1 << 30
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
"""Hosts that only this machine can reach."""
KEYS_VARIABLE = "QWEN3_OMNI_API_KEYS"
"""Environment variable with the API keys of `serve`, with commas between them."""
"""Environment variable that names the file with the keys of the session folder of `serve`."""
SLOTS = 8
"""Requests that a model runs at a time by default."""
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
_RETRY, _FULL, _CUT = "429, Retry-After", "503, Retry-After", "the connection is cut"


def name_of_model(model: str) -> str:
    """Return the default name of a model in requests: the folder's name, or the hub id."""
    return Path(model).resolve().name if Path(model).exists() else model


@dataclass(frozen=True)
class Bounds:
    """Check of a number: least <= value, or above < value; and value <= most."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def __call__(self, name: str, value: float) -> float:
        """Return the value. Raises OptionError for one out of bounds."""
        words, fits = [], True  # NaN fits no bound
        if self.least is not None:
            words, fits = [f"{self.least} or more"], value >= self.least
        if self.above is not None:
            words, fits = [f"above {self.above:g}"], value > self.above
        if self.most is not None:
            words, fits = [*words, f"at most {self.most}"], fits and value <= self.most
        if not fits:
            raise OptionError(f"{name} is {' and '.join(words)}, got {value}.")
        return value


Seconds = Annotated[float, Bounds(above=0)]
Count = Annotated[int, Bounds(least=1)]


@dataclass(frozen=True)
class Flag:
    """Flag of `serve` that gives a setting.

    description: what the setting does. name: None for a setting without a flag. default: text for
    the default. answer: status of a request that exceeds a limit.
    """

    description: str
    name: str | None
    metavar: str
    default: str
    answer: str

    @staticmethod
    def of(one: "Field[Any]") -> "Flag":
        """Return the flag of a field of ServerSettings."""
        given = one.metadata
        spelled = f"--{one.name.replace('_', '-')}" if given["flag"] == "" else given["flag"]
        text = given["shown"] or _value_text(one.name, one.default)
        return Flag(given["description"], spelled, given["metavar"], text, given["answer"])


def setting(
    default: Any,
    description: str,
    answer: str = "",
    *,
    flag: str | None = "",
    metavar: str = "N",
    shown: str = "",
    repr: bool = True,
) -> Any:
    """Return the field of a setting.

    answer: see Flag. flag: by default the setting's name with hyphens; None: it has no flag. shown:
    text for a default that is not one value. repr: whether a repr shows the value.
    """
    about = {"description": description, "answer": answer, "flag": flag, "metavar": metavar}
    return field(default=default, metadata={**about, "shown": shown}, repr=repr)


def load_setting(name: str, answer: str = "", **given: Any) -> Any:
    """Return the field of an option of a load. given: another default than the option's."""
    option = LOAD_OPTIONS[name]
    kept = {"default": option.default, "metavar": option.doc.metavar or "N"} | given
    shown = "" if kept["default"] else option.default_text
    return setting(description=option.doc.help, answer=answer, shown=shown, **kept)


class Settings:
    """Base of frozen dataclasses of settings: each value is checked by its field's annotation.

    A number of a float's field becomes one, a list a tuple, and a text a path. A wrong value
    raises OptionError.
    """

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = _checked(kind, name, getattr(self, name))
            if name in LOAD_OPTIONS:
                LOAD_OPTIONS[name].check(value)
            object.__setattr__(self, name, value)


def _kinds(settings: type) -> Mapping[str, Any]:
    """Return the annotation of each field of a class."""
    return get_type_hints(settings, include_extras=True)


def _checked(kind: Any, name: str, value: Any) -> Any:
    """Return a value as its annotation has it. Raises OptionError."""
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _checked(get_args(kind)[0], name, value)
    if get_origin(kind) is Annotated:
        kind, check = get_args(kind)
        return check(name, _checked(kind, name, value))
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise OptionError(f"{name} must be a list, got {format_value(value)}.")
        return tuple(_checked(get_args(kind)[0], name, one) for one in value)
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

    model_name: Annotated[str, _model_name] = setting(
        "qwen3-omni",
        "name of the model in requests",
        metavar="NAME",
        shown="the folder's, or the hub id",
    )
    voice_aliases: tuple[Annotated[str, _alias], ...] = setting(
        (),
        "another name of a voice, such as marin=Chelsie, before those that OpenAI's voices have; "
        "repeatable",
        flag="--voice-alias",
        metavar="NAME=VOICE",
        shown="none",
    )
    max_concurrency: int | None = load_setting("max_concurrency", _RETRY)
    max_queued: int = load_setting("max_queued", _RETRY, default=64)
    context_length: int | None = load_setting("context_length", "400")
    requests_per_minute: Count | None = setting(
        None,
        "requests a minute of one key, or of one address without keys",
        _RETRY,
        shown="any number",
    )
    owner_share: Annotated[float, Bounds(above=0, most=1)] | None = setting(
        None,
        "share of all bytes, requests and realtime sessions that one key may have, or one address "
        "without keys",
        _RETRY,
        shown="0.5; 1 with one key, and without keys on loopback",
    )
    allowed_hosts: tuple[Annotated[str, _host_name], ...] = setting(
        (),
        "name under which a server without keys may be asked, beside localhost, its addresses and "
        "`--host`; repeatable",
        "403",
        flag="--allow-host",
        metavar="NAME",
        shown="none",
    )
    allowed_origins: tuple[Annotated[str, _origin], ...] = setting(
        (),
        "page of another host that may use the server, such as https://example.org; repeatable",
        "403",
        flag="--allow-origin",
        metavar="URL",
        shown="none",
    )
    body_timeout_s: Seconds = setting(60.0, "time for a request's body", "408")
    request_timeout_s: Seconds = setting(900.0, "time of a whole request", "504")
    max_body_bytes: Count = setting(32 * MIB, "bytes of a request's body", "413")
    max_request_bytes: Count = setting(
        512 * MIB, "bytes that one request takes in memory, with its media decoded", "413"
    )
    max_held_bytes: Count = setting(
        GIB, "bytes that all requests and sessions take in memory", _FULL
    )
    max_media: int = setting(32, "media items of a request", "400")
    max_media_bytes: Count = setting(24 * MIB, "bytes of one media item", "413")
    max_media_s: Seconds = setting(1800.0, "duration of one media item", "400")
    max_pixels: Count = setting(8192 * 6144, "pixels of an image or a frame", "400")
    decoders: Count = setting(2, "processes that decode media at a time")
    decoder_bytes: Annotated[int, Bounds(least=64 * MIB)] = setting(
        GIB, "memory of one process that decodes media", "400"
    )
    decode_timeout_s: Seconds = setting(30.0, "time to decode one media item", "400")
    media_hosts: tuple[str, ...] = setting(
        (),
        "host whose URLs may be fetched for media; repeatable",
        "400",
        flag="--allow-media-host",
        metavar="HOST",
        shown="none",
    )
    media_timeout_s: Seconds = setting(10.0, "time to fetch a URL", "400")
    media_redirects: int = setting(3, "redirects of a URL", "400", flag=None)
    max_realtime_sessions: Count = setting(64, "realtime sessions that are open at a time", _FULL)
    max_realtime_s: Seconds = setting(3600.0, "duration of a realtime session", "an error event")
    max_realtime_bytes: Count = setting(
        128 * MIB,
        "bytes of a realtime session's items, and of its sound that is in no item yet",
        "an error event",
    )
    kept_replies: Count = setting(
        1000,
        "spoken replies that a later turn may name by the id of their audio, and as many responses",
        "400",
    )
    kept_reply_s: Seconds = setting(
        3600.0, "time that a spoken reply is kept, and a response from its last use", "400"
    )
    max_kept_response_bytes: Count = setting(
        64 * MIB, "bytes of responses that a later turn may name, of `--max-held-bytes`", "400"
    )
    drain_timeout_s: Seconds = setting(
        300.0, "time for running requests to end after SIGTERM", "503"
    )
    stall_timeout_s: Seconds = setting(
        300.0, "time of one call of an engine; after it /health and /ready say 503", "503"
    )
    log_content: bool = setting(False, "write texts of requests and replies to the log")


@dataclass(frozen=True)
class ServerSettings(Limits):
    """Settings of a server that owns its connections and its address."""

    host: str = setting("127.0.0.1", "address to listen on", metavar="HOST")
    port: Annotated[int, Bounds(least=0, most=65535)] = setting(8000, "port to listen on")
    tls_cert: Path | None = setting(None, "certificate, for HTTPS", metavar="PEM", shown="none")
    tls_key: Path | None = setting(
        None, "private key of the certificate", metavar="PEM", shown="none"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "API keys: a file with one a line",
        "401",
        metavar="FILE",
        shown=f"those in ${KEYS_VARIABLE}, with commas between them, or else none are needed",
        repr=False,
    )
    header_timeout_s: Seconds = setting(10.0, "time for a request's headers", _CUT)

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


def flags() -> dict[str, Flag]:
    """Return the flag of each setting, by the setting's name."""
    return {one.name: Flag.of(one) for one in fields(ServerSettings)}


def _value_text(name: str, value: Any) -> str:
    """Return a default with its unit."""
    if name.endswith("_bytes"):
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
    if isinstance(value, bool):
        return "no"
    return f"{value:g} s" if name.endswith("_s") else str(value)
