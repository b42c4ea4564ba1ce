"""Settings of an application: the `args` in its YAML, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.keys import read_keys
from qwen3_omni_neuron.serving.settings import ServerSettings, name_of_model

SLOTS = 8  # default, the same as that of `serve`
# Ray's proxies own the connections and the address. `threads` are the model's threads.
_NOT_LIMITS = {
    *("host", "port", "tls_cert", "tls_key", "max_connections", "header_timeout_s"),
    *("send_timeout_s", "api_keys", "threads"),
}
LIMITS = tuple(f.name for f in fields(ServerSettings) if f.name not in _NOT_LIMITS)


@dataclass(frozen=True)
class FleetSettings:
    """Settings of every replica of one application.

    model: checkpoint folder or hub id. compiled: folder that `compile` wrote, or address that
    `push` printed. target, dtype, placement, instance, threads, context_length: see
    Qwen3Omni.load. neuron_cores: number of cores of a replica. max_concurrency, max_queued:
    requests that run at a time in a replica, and that wait in it. api_keys: file of keys, one a
    line. server: limits of a replica, by the names in LIMITS.
    """

    model: str = str(SPEAKING_CHECKPOINT)
    compiled: str | None = None
    target: str | None = None
    dtype: str = "auto"
    placement: str = "shared"
    instance: str | None = None
    neuron_cores: int = 0
    threads: int | None = None
    max_concurrency: int | None = None
    max_queued: int = SLOTS
    context_length: int | None = None
    api_keys: str | None = None
    server: ServerSettings = field(default_factory=ServerSettings)

    def __post_init__(self) -> None:
        """Check the values that nothing else checks. Raises OptionError."""
        if self.neuron_cores < 0:
            raise OptionError(f"neuron_cores is 0 or more, got {self.neuron_cores}.")
        if self.max_queued < 0:
            raise OptionError(f"max_queued is 0 or more, got {self.max_queued}.")
        for name in ("threads", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is 1 or more, got {value}.")

    @staticmethod
    def parse(args: Mapping[str, Any]) -> "FleetSettings":
        """Read the `args` of an application. Raises OptionError, also for an unknown name."""
        own = [f.name for f in fields(FleetSettings) if f.name != "server"]
        unknown = sorted(map(str, set(args) - {*own, *LIMITS}))
        if unknown:
            raise OptionError(
                f"args has {', '.join(unknown)}, which is unknown. It may have "
                f"{', '.join(own)}; and the server's {', '.join(LIMITS)}."
            )
        model = str(args.get("model", FleetSettings.model))
        server: dict[str, Any] = {"model_name": name_of_model(model)}
        server |= {name: args[name] for name in LIMITS if name in args}
        if isinstance(origins := args.get("allowed_origins"), list):
            server["allowed_origins"] = [str(url).lower().rstrip("/") for url in origins]
        given = {name: args[name] for name in own if name in args} | {"server": server}
        try:
            return TypeAdapter(FleetSettings).validate_python(given)
        except ValidationError as error:
            wrong = [
                f"{'.'.join(str(part) for part in one['loc'] if part != 'server')}: {one['msg']}"
                for one in error.errors()
            ]
            raise OptionError(f"args can't be used: {'; '.join(wrong)}.") from error

    @property
    def slots(self) -> int:
        """Requests that a replica runs at a time, as far as known before the model is loaded."""
        return self.max_concurrency or SLOTS

    def server_settings(self) -> ServerSettings:
        """Return the server's settings, with the API keys read from their file."""
        if self.api_keys is None:
            return self.server
        return replace(self.server, api_keys=read_keys(Path(self.api_keys)))

    def load_arguments(self, cores: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the arguments of `serving.model.load_and_answer`. cores: cores of each stage."""
        slots = self.max_concurrency or (None if self.compiled else SLOTS)
        return {
            "model": self.model,
            "compiled_path": self.compiled,
            "target": self.target,
            "dtype": self.dtype,
            "placement": self.placement,
            "instance": self.instance,
            "threads": self.threads,
            "max_concurrency": slots,
            "max_queued": self.max_queued,
            "context_length": self.context_length,
            "cores": cores if self.compiled else None,  # without a tree the model runs on the CPU
        }
