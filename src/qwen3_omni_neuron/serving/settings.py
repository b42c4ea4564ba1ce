"""Settings of the server: addresses, limits and deadlines."""

from dataclasses import dataclass, field
from pathlib import Path

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.decoding.job import PoolSettings

MIB = 1 << 20
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
"""Hosts that only this machine can reach."""


def name_of_model(model: str) -> str:
    """Return the default name of a model in requests: the folder's name, or the hub id."""
    return Path(model).resolve().name if Path(model).exists() else model


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, limits and deadlines of one server. Times are in seconds.

    model_name: model name in requests. api_keys: keys that may use the server; none: everybody may.
    requests_per_minute: limit for one key, or one address without keys; None: no limit.
    max_connections: open connections; one more gets a 503. header_timeout_s, body_timeout_s: time
    for a request's headers, and for its body. send_timeout_s: time for a client that has stopped
    reading to continue. request_timeout_s: time for a whole request.
    max_body_bytes: size of one request's body. max_request_bytes: memory that one request holds:
    its body, decoded media, mel features. max_held_bytes: memory that all requests and sessions
    hold. owner_share: fraction of all bytes, requests and sessions for one owner, a key or an
    address; None: half if there can be several owners, otherwise all.
    max_media, max_media_bytes, max_media_s, max_pixels: number of media items in a request; and
    one item's bytes, duration, and pixels of an image or a frame. decoders: processes that decode
    media at a time; decoder_bytes, decode_timeout_s: memory and time of one. media_hosts: hosts
    whose URLs may be fetched, none by default; media_timeout_s, media_redirects: limits of a fetch.
    kept_replies, kept_reply_s: number of spoken replies that later turns may refer to, and time.
    max_realtime_sessions: open sessions. max_realtime_s: duration of one. max_realtime_bytes: bytes
    of one session's items, and of sound that is in no item yet.
    allowed_hosts: further host names for a server without keys, beside localhost, its addresses,
    and host. allowed_origins: pages of other hosts that may use the server, such as
    "https://example.org".
    drain_timeout_s: time for running requests to end after SIGTERM. stall_timeout_s: time of one
    engine call, after which the model counts as stalled. threads: threads that read requests and
    their media. log_content: write texts of requests and replies into the log.
    """

    model_name: str = "qwen3-omni"
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    requests_per_minute: int | None = None
    max_connections: int = 1000
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 30.0
    request_timeout_s: float = 900.0
    max_body_bytes: int = 32 * MIB
    max_request_bytes: int = 512 * MIB
    max_held_bytes: int = 1024 * MIB
    owner_share: float | None = None
    max_media: int = 32
    max_media_bytes: int = 24 * MIB
    max_media_s: float = 1800.0
    max_pixels: int = 4096 * 4096
    decoders: int = 2
    decoder_bytes: int = 1024 * MIB
    decode_timeout_s: float = 30.0
    media_hosts: tuple[str, ...] = ()
    media_timeout_s: float = 10.0
    media_redirects: int = 3
    kept_replies: int = 1000
    kept_reply_s: float = 3600.0
    max_realtime_sessions: int = 64
    max_realtime_s: float = 3600.0
    max_realtime_bytes: int = 128 * MIB
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    drain_timeout_s: float = 300.0
    stall_timeout_s: float = 300.0
    threads: int = 4
    log_content: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises OptionError."""
        if not self.model_name or not self.model_name.isprintable():
            raise OptionError("the model's name is empty, or has characters that can't be printed.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("TLS needs both --tls-cert and --tls-key.")
        for name in (
            *("max_connections", "max_body_bytes", "max_request_bytes", "max_held_bytes"),
            *("max_media_bytes", "max_pixels", "threads", "kept_replies"),
            *("max_realtime_sessions", "max_realtime_bytes"),
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is 1 or more, got {getattr(self, name)}.")
        for name in (
            *("header_timeout_s", "body_timeout_s", "send_timeout_s", "request_timeout_s"),
            *("max_media_s", "media_timeout_s", "kept_reply_s", "drain_timeout_s"),
            *("max_realtime_s", "stall_timeout_s"),
        ):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is above 0, got {getattr(self, name)}.")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise OptionError(f"requests_per_minute is 1 or more, got {self.requests_per_minute}.")
        if self.owner_share is not None and not 0 < self.owner_share <= 1:
            raise OptionError(f"owner_share is above 0 and at most 1, got {self.owner_share}.")
        _ = self.decoding  # checks the decoders' values
        for name in self.allowed_hosts:
            if not name or any(mark in name for mark in "/:@ "):
                raise OptionError(
                    f"allowed_hosts has names alone, such as example.org, without scheme and port; "
                    f"got {name!r}."
                )
        if any(not key for key in self.api_keys):
            raise OptionError("an API key is empty.")

    @property
    def decoding(self) -> PoolSettings:
        """Limits of the processes that decode media. Raises OptionError."""
        return PoolSettings(self.decoders, self.decoder_bytes, self.decode_timeout_s)

    @property
    def share_of_owner(self) -> float:
        """Fraction of all bytes, requests and sessions that one owner may have."""
        if self.owner_share is not None:
            return self.owner_share
        one = len(self.api_keys) == 1 or (not self.api_keys and self.host in LOOPBACK)
        return 1.0 if one else 0.5
