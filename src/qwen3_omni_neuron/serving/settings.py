"""Settings of a server: options with bounds, status, and flag of `serve`.

`serve`'s flags, a Ray application's `args` and a table of docs/serving.md are generated from them.
The command line imports this module early, so it needs no other package.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.options import (
    FROM_1,
    GIB,
    LOAD_OPTIONS,
    MIB,
    SECONDS,
    integers,
    list_of,
    option,
    options_of,
    positive,
)

LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
"""Hosts that only this machine can reach."""
KEYS_VARIABLE = "QWEN3_OMNI_API_KEYS"
"""Environment variable with API keys, separated by commas."""
SLOTS = 8
"""Default number of a model's concurrent requests."""
_RETRY, _FULL, _CUT = "429, Retry-After", "503, Retry-After", "the connection is cut"
_FROM_0 = integers(0)
_TEXTS = list_of("texts", lambda value: isinstance(value, str))
_HOSTS = list_of(
    "names alone, such as example.org, without scheme and port",
    lambda name: isinstance(name, str) and name != "" and not set(name) & {*"/:@ "},
)
_ALIASES = list_of(
    "NAME=VOICE, such as marin=Chelsie",
    lambda text: isinstance(text, str) and all(part.strip() for part in text.partition("=")),
)


def name_of_model(model: str) -> str:
    """Return a model's default name in requests: its folder's name or hub id."""
    return Path(model).resolve().name if Path(model).exists() else model


def load_option(name: str, answer: str = "", **given: Any) -> Any:
    """Return a load option's field. given: another default."""
    load = replace(LOAD_OPTIONS[name], answer=answer, flag="", **given)
    return field(default=load.default, metadata={"option": load})


@dataclass(frozen=True)
class Limits:
    """Limits and deadlines of a server, alone or a replica in a Ray cluster.

    Converts values to the fields' types. Raises OptionError.
    """

    model_name: str = option(
        "qwen3-omni",
        "name of the model in requests",
        metavar="NAME",
        shown="the folder's, or the hub id",
    )
    voice_aliases: tuple[str, ...] = option(
        (),
        "another name of a voice, such as marin=Chelsie; overrides OpenAI's names",
        _ALIASES,
        flag="--voice-alias",
        metavar="NAME=VOICE",
    )
    max_concurrency: int | None = load_option("max_concurrency", _RETRY)
    max_queued: int = load_option("max_queued", _RETRY, default=64)
    context_length: int | None = load_option("context_length", "400")
    requests_per_minute: int | None = option(
        None,
        "requests per minute per API key (without keys: per address)",
        FROM_1,
        _RETRY,
        shown="any number",
    )
    owner_share: float | None = option(
        None,
        "largest share of memory, requests and sessions per API key (without keys: per address)",
        positive(1),
        _RETRY,
        shown="0.5; 1 with one key, and without keys on loopback",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name accepted without keys, besides localhost, IP addresses and `--host`",
        _HOSTS,
        "403",
        flag="--allow-host",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "page of another host that may use the server, such as https://example.org",
        _TEXTS,
        "403",
        flag="--allow-origin",
        metavar="URL",
    )
    body_timeout_s: float = option(60.0, "time to receive a request's body", SECONDS, "408")
    request_timeout_s: float = option(
        900.0, "time per request, and again to send the rest of a finished answer", SECONDS, "504"
    )
    max_body_bytes: int = option(32 * MIB, "bytes of a request's body", FROM_1, "413")
    max_request_bytes: int = option(
        512 * MIB, "memory of one request, with its media decoded, in bytes", FROM_1, "413"
    )
    max_held_bytes: int = option(
        GIB, "memory of all requests and sessions, in bytes", FROM_1, _FULL
    )
    max_media: int = option(32, "media items of a request", _FROM_0, "400")
    max_media_bytes: int = option(24 * MIB, "bytes of one media item", FROM_1, "413")
    max_media_s: float = option(1800.0, "duration of one media item", SECONDS, "400")
    max_pixels: int = option(8192 * 6144, "pixels of an image or a frame", FROM_1, "400")
    decoders: int = option(2, "processes that decode media concurrently", FROM_1)
    decoder_bytes: int = option(
        GIB, "memory of one decoding process, in bytes", integers(64 * MIB), "400"
    )
    decode_timeout_s: float = option(30.0, "time to decode one media item", SECONDS, "400")
    media_hosts: tuple[str, ...] = option(
        (),
        "host whose URLs may be fetched for media",
        _TEXTS,
        "400",
        flag="--allow-media-host",
        metavar="HOST",
    )
    media_timeout_s: float = option(10.0, "time to fetch a URL", SECONDS, "400")
    media_redirects: int = option(3, "redirects of a URL", _FROM_0, "400", flag=None)
    max_realtime_sessions: int = option(64, "concurrent realtime sessions", FROM_1, _FULL)
    max_realtime_s: float = option(
        3600.0, "duration of a realtime session", SECONDS, "an error event"
    )
    max_realtime_bytes: int = option(
        128 * MIB,
        "bytes of a realtime session's items and uncommitted audio",
        FROM_1,
        "an error event",
    )
    kept_replies: int = option(
        1000, "stored spoken replies, and as many stored responses", FROM_1, "400"
    )
    kept_reply_s: float = option(
        3600.0, "time to store spoken replies, and responses after last use", SECONDS, "400"
    )
    max_kept_response_bytes: int = option(
        64 * MIB, "bytes of stored responses, within `--max-held-bytes`", FROM_1, "400"
    )
    drain_timeout_s: float = option(
        300.0, "time for running requests to end after SIGTERM", SECONDS, "503"
    )
    stall_timeout_s: float = option(
        300.0, "time per engine call, after which /health and /ready answer 503", SECONDS, "503"
    )
    log_content: bool = option(False, "log the texts of requests and replies", shown="no")

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            object.__setattr__(self, name, declared.converted(getattr(self, name)))
        origins = tuple(url.lower().rstrip("/") for url in self.allowed_origins)  # as browsers do
        object.__setattr__(self, "allowed_origins", origins)


@dataclass(frozen=True)
class ServerSettings(Limits):
    """Settings of a server with its own connections and address."""

    host: str = option("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = option(8000, "port to listen on", integers(0, 65535))
    tls_cert: Path | None = option(None, "certificate, for HTTPS", metavar="PEM")
    tls_key: Path | None = option(None, "private key of the certificate", metavar="PEM")
    api_keys: tuple[str, ...] = option(
        (),
        "file of API keys, one per line",
        _TEXTS,
        "401",
        metavar="FILE",
        shown=f"those in ${KEYS_VARIABLE}, comma-separated; else no key is needed",
        repr=False,
    )
    header_timeout_s: float = option(10.0, "time to receive a request's headers", SECONDS, _CUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("TLS needs both --tls-cert and --tls-key.")

    @property
    def share_of_owner(self) -> float:
        """Largest fraction of all bytes, requests and sessions per owner."""
        if self.owner_share is not None:
            return self.owner_share
        one = len(self.api_keys) == 1 or (not self.api_keys and self.host in LOOPBACK)
        return 1.0 if one else 0.5


SETTINGS = options_of(ServerSettings)
"""Settings of `serve`, by name."""
