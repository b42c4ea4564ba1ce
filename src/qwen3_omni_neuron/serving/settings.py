"""Settings of a server. Each is a field with its default, bounds, meaning, and flag of `serve`.

The flags of `serve`, the `args` of a Ray application and a table of docs/serving.md are made from
these fields. Imported by the command line: of other packages it needs pydantic alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from qwen3_omni_neuron.errors import OptionError

MIB, GIB = 1 << 20, 1 << 30
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
"""Hosts that only this machine can reach."""
KEYS_VARIABLE = "QWEN3_OMNI_API_KEYS"
"""Environment variable with the API keys of `serve`, with commas between them."""
SLOTS = 8
"""Requests that a model runs at a time by default."""
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def name_of_model(model: str) -> str:
    """Return the default name of a model in requests: the folder's name, or the hub id."""
    return Path(model).resolve().name if Path(model).exists() else model


@dataclass(frozen=True)
class Flag:
    """Flag of a setting, as far as the field's name, type and default do not say it.

    name: by default the field's name with hyphens; None for a field that has no flag. default: text
    for a default that is not one value. answer: status of a request that exceeds a limit.
    """

    name: str | None = ""
    metavar: str = "N"
    default: str = ""
    answer: str = ""

    @staticmethod
    def of(model: "type[Settings]", name: str) -> "Flag":
        """Return the flag of a field, with its name and the text of its default."""
        field = model.model_fields[name]
        flag = next((one for one in field.metadata if isinstance(one, Flag)), Flag())
        spelled = f"--{name.replace('_', '-')}" if flag.name == "" else flag.name
        return replace(flag, name=spelled, default=flag.default or _value_text(name, field.default))


class Settings(BaseModel):
    """Base of frozen settings. An unknown name or a wrong value raises OptionError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise OptionError("; ".join(map(_said, error.errors(include_url=False)))) from None


def _origin(url: str) -> str:
    """Return an origin as browsers send it."""
    return url.lower().rstrip("/")


def _share(share: float | None) -> float | None:
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"owner_share is above 0 and at most 1, got {share}.")
    return share


def _host_name(name: str) -> str:
    if not name or any(mark in name for mark in "/:@ "):
        raise ValueError(
            "allowed_hosts has names alone, such as example.org, without scheme and port; got "
            f"{name!r}."
        )
    return name


class Limits(Settings):
    """Limits and deadlines of one server, alone or a replica in a Ray cluster."""

    model_name: Annotated[str, Flag(metavar="NAME", default="the folder's, or the hub id")] = Field(
        "qwen3-omni", description="name of the model in requests"
    )
    max_concurrency: Annotated[
        Count | None, Flag(default=f"{SLOTS}, or as compiled", answer="429, Retry-After")
    ] = Field(None, description="requests that run at a time")
    max_queued: Annotated[int, Flag(answer="429, Retry-After")] = Field(
        64, ge=0, description="requests that wait for a slot"
    )
    context_length: Annotated[int | None, Flag(default="8192, or as compiled", answer="400")] = (
        Field(None, description="positions of a request: its prompt and its text")
    )
    requests_per_minute: Annotated[
        Count | None, Flag(default="any number", answer="429, Retry-After")
    ] = Field(None, description="requests a minute of one key, or of one address without keys")
    owner_share: Annotated[
        float | None,
        AfterValidator(_share),
        Flag(
            default="0.5; 1 with one key, and without keys on loopback",
            answer="429, Retry-After",
        ),
    ] = Field(
        None,
        description="share of all bytes, requests and realtime sessions that one key may have, or "
        "one address without keys",
    )
    allowed_hosts: Annotated[
        tuple[Annotated[str, AfterValidator(_host_name)], ...],
        Flag("--allow-host", "NAME", "none", "403"),
    ] = Field(
        (),
        description="name under which a server without keys may be asked, beside localhost, its "
        "addresses and `--host`; repeatable",
    )
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...],
        Flag("--allow-origin", "URL", "none", "403"),
    ] = Field(
        (),
        description="page of another host that may use the server, such as https://example.org; "
        "repeatable",
    )
    body_timeout_s: Annotated[Seconds, Flag(answer="408")] = Field(
        60.0, description="time for a request's body"
    )
    request_timeout_s: Annotated[Seconds, Flag(answer="504")] = Field(
        900.0, description="time of a whole request, and of the unsent rest of an ended answer"
    )
    max_body_bytes: Annotated[Count, Flag(answer="413")] = Field(
        32 * MIB, description="bytes of a request's body"
    )
    max_request_bytes: Annotated[Count, Flag(answer="413")] = Field(
        512 * MIB, description="bytes that one request takes in memory, with its media decoded"
    )
    max_held_bytes: Annotated[Count, Flag(answer="503, Retry-After")] = Field(
        GIB, description="bytes that all requests and sessions take in memory"
    )
    max_media: Annotated[int, Flag(answer="400")] = Field(
        32, description="media items of a request"
    )
    max_media_bytes: Annotated[Count, Flag(answer="413")] = Field(
        24 * MIB, description="bytes of one media item"
    )
    max_media_s: Annotated[Seconds, Flag(answer="400")] = Field(
        1800.0, description="duration of one media item"
    )
    max_pixels: Annotated[Count, Flag(answer="400")] = Field(
        4096 * 4096, description="pixels of an image or a frame"
    )
    decoders: Count = Field(2, description="processes that decode media at a time")
    decoder_bytes: Annotated[int, Flag(answer="400")] = Field(
        GIB, ge=64 * MIB, description="memory of one process that decodes media"
    )
    decode_timeout_s: Annotated[Seconds, Flag(answer="400")] = Field(
        30.0, description="time to decode one media item"
    )
    media_hosts: Annotated[tuple[str, ...], Flag("--allow-media-host", "HOST", "none", "400")] = (
        Field((), description="host whose URLs may be fetched for media; repeatable")
    )
    media_timeout_s: Annotated[Seconds, Flag(answer="400")] = Field(
        10.0, description="time to fetch a URL"
    )
    media_redirects: Annotated[int, Flag(None)] = Field(3, description="redirects of a URL")
    max_realtime_sessions: Annotated[Count, Flag(answer="503, Retry-After")] = Field(
        64, description="realtime sessions that are open at a time"
    )
    max_realtime_s: Annotated[Seconds, Flag(answer="an error event")] = Field(
        3600.0, description="duration of a realtime session"
    )
    max_realtime_bytes: Annotated[Count, Flag(answer="an error event")] = Field(
        128 * MIB,
        description="bytes of a realtime session's items, and of its sound that is in no item yet",
    )
    kept_replies: Annotated[Count, Flag(answer="400")] = Field(
        1000, description="spoken replies that a later turn may name by the id of their audio"
    )
    kept_reply_s: Annotated[Seconds, Flag(answer="400")] = Field(
        3600.0, description="time that such a reply is kept"
    )
    drain_timeout_s: Annotated[Seconds, Flag(answer="503")] = Field(
        300.0, description="time for running requests to end after SIGTERM"
    )
    stall_timeout_s: Annotated[Seconds, Flag(answer="503")] = Field(
        300.0, description="time of one call of an engine; after it /health and /ready say 503"
    )
    log_content: bool = Field(False, description="write texts of requests and replies to the log")

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, name: str) -> str:
        if not name or not name.isprintable():
            raise ValueError("the model's name is empty, or has characters that can't be printed.")
        return name


class ServerSettings(Limits):
    """Settings of a server that owns its connections and its address."""

    host: Annotated[str, Flag(metavar="HOST")] = Field(
        "127.0.0.1", description="address to listen on"
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    tls_cert: Annotated[Path | None, Flag(metavar="PEM", default="none")] = Field(
        None, description="certificate, for HTTPS"
    )
    tls_key: Annotated[Path | None, Flag(metavar="PEM", default="none")] = Field(
        None, description="private key of the certificate"
    )
    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            metavar="FILE",
            default=f"those in ${KEYS_VARIABLE}, with commas between them, or else none are needed",
            answer="401",
        ),
    ] = Field((), repr=False, description="API keys: a file with one a line")
    max_connections: Annotated[Count, Flag(answer="503, Retry-After")] = Field(
        1000, description="connections that are open at a time, those in a TLS handshake among them"
    )
    header_timeout_s: Annotated[Seconds, Flag(answer="the connection is cut")] = Field(
        10.0, description="time for a request's headers, and for a TLS handshake"
    )
    send_timeout_s: Annotated[Seconds, Flag(answer="the connection is cut")] = Field(
        30.0, description="time for a client that has stopped reading to go on"
    )

    @model_validator(mode="after")
    def _check_tls_and_keys(self) -> "ServerSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both --tls-cert and --tls-key.")
        if not all(self.api_keys):
            raise ValueError("an API key is empty.")
        return self

    @property
    def share_of_owner(self) -> float:
        """Fraction of all bytes, requests and sessions that one owner may have."""
        if self.owner_share is not None:
            return self.owner_share
        one = len(self.api_keys) == 1 or (not self.api_keys and self.host in LOOPBACK)
        return 1.0 if one else 0.5


def _said(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a setting, and its bounds."""
    name, context = ".".join(map(str, error["loc"])), error.get("ctx", {})
    words = {"greater_than_equal": "{ge} or more", "greater_than": "above {gt:g}"}
    words["less_than_equal"] = "at most {le}"
    if error["type"] in words:
        return f"{name} is {words[error['type']].format(**context)}, got {error['input']}."
    return str(context["error"]) if error["type"] == "value_error" else f"{name}: {error['msg']}."


def _value_text(name: str, value: Any) -> str:
    """Return a default with its unit."""
    if name.endswith("_bytes"):
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
    if isinstance(value, bool):
        return "no"
    return f"{value:g} s" if name.endswith("_s") else str(value)
