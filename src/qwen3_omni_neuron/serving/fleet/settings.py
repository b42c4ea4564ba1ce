"""Settings of an application: its YAML's `args`, and `serve --ray`, which checks and runs it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import REMOVED_OPTIONS, OptionError, removed
from qwen3_omni_neuron.options import (
    LOAD_OPTIONS,
    LoadOptions,
    check_names,
    integers,
    option,
    options_of,
)
from qwen3_omni_neuron.serving.edge.keys import read_keys
from qwen3_omni_neuron.serving.fleet.affinity import CALLBACK
from qwen3_omni_neuron.serving.settings import (
    SLOTS,
    Limits,
    ServerSettings,
    load_option,
    name_of_model,
)

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
KILL_VARIABLE = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
IMPORT_PATH = "qwen3_omni_neuron.serving.fleet.application:build"
# Load options by their names in `args`. Ray assigns the cores.
_LOAD = {
    one.flag[2:].replace("-", "_"): name
    for name, one in LOAD_OPTIONS.items()
    if name == "target" or (one.loads and name != "cores")
}


@dataclass(frozen=True)
class FleetSettings(Limits):
    """Settings of an application's replicas. load: load options, beside the other `args`."""

    model: str = option(str(SPEAKING_CHECKPOINT), "checkpoint folder or hub id")
    load: LoadOptions = field(default_factory=LoadOptions)
    neuron_cores: int = option(0, "cores per replica", integers(0))
    max_queued: int = load_option("max_queued", default=SLOTS)
    api_keys: str | None = option(None, "file of API keys, one per line")

    @staticmethod
    def parse(args: Mapping[str, Any]) -> "FleetSettings":
        """Read the `args` of an application. Raises OptionError, also for an unknown name."""
        own = options_of(FleetSettings)
        check_names(map(str, args), [*own, *_LOAD])
        load = LoadOptions.parse({_LOAD[name]: args[name] for name in args if name in _LOAD})
        given = {name: value for name, value in args.items() if name in own}
        name = name_of_model(str(args.get("model", SPEAKING_CHECKPOINT)))
        return FleetSettings(**{"model_name": name, "load": load, **given})

    @property
    def slots(self) -> int:
        """Concurrent requests of a replica, as known before loading the model."""
        return self.max_concurrency or SLOTS

    def server_settings(self) -> ServerSettings:
        """Return the server's settings, with the API keys from their file."""
        keys = () if self.api_keys is None else read_keys(Path(self.api_keys))
        limits = {one.name: getattr(self, one.name) for one in fields(Limits)}
        return ServerSettings(**limits, api_keys=keys)

    def load_arguments(self, cores: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the arguments of `serving.model.load_and_answer`. cores: cores of each stage."""
        limits = {
            one.name: getattr(self, one.name) for one in fields(Limits) if one.name in LOAD_OPTIONS
        }
        compiled = self.load.compiled_path is not None
        return {
            "model": self.model,
            **vars(self.load),
            **limits,
            "max_concurrency": self.max_concurrency or (None if compiled else SLOTS),
            "cores": cores if compiled else None,  # without a tree the model runs on the CPU
        }


def run_config(config: Path) -> NoReturn:
    """Replace this process by Ray's `serve run` of a Serve YAML. Raises OptionError."""
    check_config(config)
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
    os.execve(sys.executable, command, environment())


def check_config(config: Path) -> None:
    """Check the settings of this package's applications in a Serve YAML. Raises OptionError."""
    import yaml

    try:
        applications = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"]
        ours = [one for one in applications if one["import_path"] == IMPORT_PATH]
        others = [removed(one["import_path"], REMOVED_OPTIONS) for one in applications]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise OptionError(f"{config} can't be read as a Serve YAML: {error!r}.") from error
    if not ours:
        reason = next(filter(None, others), "Begin with a file of deploy/ray.")
        raise OptionError(f"{config} has no application with import_path {IMPORT_PATH}. {reason}")
    for one in ours:
        FleetSettings.parse(one.get("args") or {})


def environment() -> dict[str, str]:
    """Return a Ray cluster's environment: it routes by conversation, and kills immediately."""
    return {CALLBACK_VARIABLE: CALLBACK, KILL_VARIABLE: "1", **os.environ}
