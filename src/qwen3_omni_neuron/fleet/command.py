"""`serve --ray CONFIG`: Ray's own `serve run CONFIG`, after its settings were checked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.fleet.settings import FleetSettings

IMPORT_PATH = "qwen3_omni_neuron.fleet.application:build"


def run_config(config: Path) -> int:
    """Run the applications of a Serve YAML until a signal comes. Returns the exit status.

    A Ray cluster is started for it, unless RAY_ADDRESS names one. Raises OptionError where the file
    can't be read, or has settings that can't be used.
    """
    check_config(config)
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
    return subprocess.run(command, env=environment(), check=False).returncode


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
        if isinstance(one, dict) and one.get("import_path") == IMPORT_PATH
    ]
    if not ours:
        raise OptionError(
            f"{config} has no application whose import_path is {IMPORT_PATH}. Begin with a file of "
            "deploy/ray."
        )
    for one in ours:
        FleetSettings.parse(one.get("args") or {})


def environment() -> dict[str, str]:
    """Return the environment of a Ray cluster whose proxies route by conversation."""
    return dict(os.environ)
