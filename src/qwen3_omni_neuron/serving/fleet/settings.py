"""Settings of an application: the `args` in its YAML, checked once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.keys import read_keys
from qwen3_omni_neuron.serving.settings import (
    RENAMED,
    SLOTS,
    Count,
    Limits,
    ServerSettings,
    name_of_model,
    renamed,
)


class FleetSettings(Limits):
    """Settings of every replica of one application: its limits, and how it loads its model.

    model: checkpoint folder or hub id. compiled: folder that `compile` wrote, or address that
    `push` printed. target, dtype, kv_cache_dtype, predictor_dtype, placement, instance, threads:
    see Qwen3Omni.load. neuron_cores: number of cores of a replica. api_keys: file of keys, one a
    line. Ray's proxies own the connections and the address, so that ServerSettings has further
    fields.
    """

    model: str = str(SPEAKING_CHECKPOINT)
    compiled: str | None = None
    target: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    predictor_dtype: str = "auto"
    placement: str = "shared"
    instance: str | None = None
    neuron_cores: int = Field(0, ge=0)
    threads: Count | None = None
    max_queued: int = Field(SLOTS, ge=0)
    api_keys: str | None = None

    @staticmethod
    def parse(args: Mapping[str, Any]) -> "FleetSettings":
        """Read the `args` of an application. Raises OptionError, also for an unknown name."""
        known = FleetSettings.model_fields
        unknown = sorted(map(str, set(args) - set(known)))
        for name in RENAMED:
            if name in unknown:
                raise OptionError(renamed(name))
        if unknown:
            raise OptionError(
                f"args has {', '.join(unknown)}, which is unknown. It may have {', '.join(known)}."
            )
        name = name_of_model(str(args.get("model", SPEAKING_CHECKPOINT)))
        return FleetSettings(**{"model_name": name, **args})

    @property
    def slots(self) -> int:
        """Requests that a replica runs at a time, as far as known before the model is loaded."""
        return self.max_concurrency or SLOTS

    def server_settings(self) -> ServerSettings:
        """Return the server's settings, with the API keys read from their file."""
        keys = () if self.api_keys is None else read_keys(Path(self.api_keys))
        limits = {name: getattr(self, name) for name in Limits.model_fields}
        return ServerSettings(**limits, api_keys=keys)

    def load_arguments(self, cores: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the arguments of `serving.model.load_and_answer`. cores: cores of each stage."""
        slots = self.max_concurrency or (None if self.compiled else SLOTS)
        return {
            "model": self.model,
            "compiled_path": self.compiled,
            "target": self.target,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "predictor_dtype": self.predictor_dtype,
            "placement": self.placement,
            "instance": self.instance,
            "threads": self.threads,
            "max_concurrency": slots,
            "max_queued": self.max_queued,
            "context_length": self.context_length,
            **self.spill_arguments,
            "cores": cores if self.compiled else None,  # without a tree the model runs on the CPU
        }
