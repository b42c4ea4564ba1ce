"""`serve --ray CONFIG`: checks the settings, then runs Ray's own `serve run CONFIG`."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.fleet.affinity import CALLBACK
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
KILL_VARIABLE = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
IMPORT_PATH = "qwen3_omni_neuron.serving.fleet.application:build"
FORMER_IMPORT_PATH = "qwen3_omni_neuron.fleet.application:build"
"""Import path of the application in version 0.1.0."""


def run_config(config: Path) -> NoReturn:
    """Replace this process by Ray's, which runs the applications of a Serve YAML.

    It starts a Ray cluster, unless RAY_ADDRESS names one, and ends on a signal. Raises
    OptionError if the file can't be read, or has settings that can't be used.
    """
    check_config(config)
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
    os.execve(sys.executable, command, environment())


def check_config(config: Path) -> None:
    """Check the settings of this package's applications in a Serve YAML. Raises OptionError."""
    import yaml

    try:
        content: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionError(f"{config} can't be read as YAML: {error}.") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    ours = [
        one
        for one in (applications if isinstance(applications, list) else [])
        if isinstance(one, dict) and one.get("import_path") in (IMPORT_PATH, FORMER_IMPORT_PATH)
    ]
    if any(one["import_path"] == FORMER_IMPORT_PATH for one in ours):
        raise OptionError(
            f"{config} has the import_path {FORMER_IMPORT_PATH}, which became {IMPORT_PATH} in "
            "version 0.2.0. Write the new one: "
            f"sed -i.old 's/{FORMER_IMPORT_PATH}/{IMPORT_PATH}/' {shlex.quote(str(config))}"
        )
    if not ours:
        raise OptionError(
            f"{config} has no application whose import_path is {IMPORT_PATH}. Begin with a file of "
            "deploy/ray."
        )
    for one in ours:
        FleetSettings.parse(one.get("args") or {})


def environment() -> dict[str, str]:
    """Return the environment of a Ray cluster.

    Its proxies route by conversation. It kills an unhealthy replica at once: otherwise a replica
    that does not answer would keep its cores and clients for graceful_shutdown_timeout_s.
    """
    return {CALLBACK_VARIABLE: CALLBACK, KILL_VARIABLE: "1", **os.environ}
