"""`qwen3-omni-neuron doctor`: reports this machine, versions and missing packages."""

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.cli.parsing import add_examples
from qwen3_omni_neuron.compilation.versions import (
    LIBRARIES,
    PACKAGE,
    installed_version,
    installed_versions,
    missing_packages,
)
from qwen3_omni_neuron.neuron.target import LIMITS
from qwen3_omni_neuron.neuron.torchneuron.environment import COMPILER_FLAGS, OPT_LEVEL
from qwen3_omni_neuron.neuron.versions import (
    NEURON_SDK,
    TORCHNEURON_SDK,
    is_supported,
    supported_neuron,
    supported_torchneuron,
)

EXTRAS = ("serve", "realtime", "smart-turn", "video", "ray")
NEURON_VARIABLES = ("NEURON_", "TORCH_NEURONX_")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_doctor)
    add_examples(parser, "doctor", "doctor --json")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _doctor(parsed: argparse.Namespace) -> int:
    versions = dict.fromkeys(LIBRARIES, "not installed") | installed_versions()
    report = {"machine": _machine(), "packages": versions, "extras": _extras(), "neuron": _neuron()}
    print(json.dumps(report, allow_nan=False) if parsed.json else "\n\n".join(_tables(report)))
    return 0


def _machine() -> dict[str, str]:
    cpu = _values("/proc/cpuinfo").get("model name", platform.machine())
    memory, disk = _values("/proc/meminfo"), shutil.disk_usage(".")
    total, free = (int(memory.get(n, "0").split()[0]) for n in ("MemTotal", "MemAvailable"))
    return {
        "system": platform.platform(),
        "CPU": f"{cpu}, {os.cpu_count()} cores",
        "memory": f"{total * 1024 / 1e9:.1f} GB, {free * 1024 / 1e9:.1f} GB available",
        "load": f"{os.getloadavg()[0]:.1f} (last minute); it raises TTFB and RTF",
        "disk here": f"{disk.total / 1e9:.1f} GB, {disk.free / 1e9:.1f} GB free",
        "steps in C": _library(),
        "Neuron devices": str(len(list(Path("/dev").glob("neuron[0-9]*"))) or "none"),
    }


def _values(file: str) -> dict[str, str]:
    lines = Path(file).read_text(encoding="utf-8").splitlines() if Path(file).exists() else []
    return {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}


def _library() -> str:
    try:
        from qwen3_omni_neuron.cpu.native.installed import library_verdict
    except (ImportError, OSError) as error:
        return f"unknown: torch can't be imported ({error})"
    return library_verdict()


def _extras() -> dict[str, list[str]]:
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {}
    return {extra: missing_packages(required, extra) for extra in EXTRAS}


def _neuron() -> dict[str, Any]:
    targets = {
        f"torchneuron (SDK {TORCHNEURON_SDK})": supported_torchneuron(),
        f"neuron (SDK {NEURON_SDK})": supported_neuron(),
    }
    first, *others = LIMITS.opt_levels
    levels = f"-O{first}, or -O{' or -O'.join(map(str, others))} with compile --opt-level"
    return {
        target: {name: [wanted, installed_version(name)] for name, wanted in packages.items()}
        for target, packages in targets.items()
    } | {
        "flags": {**COMPILER_FLAGS, OPT_LEVEL: levels},
        "variables": {n: v for n, v in os.environ.items() if n.startswith(NEURON_VARIABLES)},
    }


def _tables(report: dict[str, Any]) -> Iterable[str]:
    yield _table(("machine", ""), report["machine"].items())
    yield _table(("package", "version"), report["packages"].items())
    rows = [
        (extra, ", ".join(lacks) or "nothing", f"`pip install '{PACKAGE}[{extra}]'`" * bool(lacks))
        for extra, lacks in report["extras"].items()
    ]
    yield _table(("extra", "missing", "install"), rows or [("unknown", "not installed", "")])
    for target, packages in report["neuron"].items():
        if target not in ("flags", "variables"):
            found = [(name, *_verdict(*versions)) for name, versions in packages.items()]
            yield _table((f"target {target}", "supported", "installed", ""), found)
    yield _table(("torchneuron's compiler flag", "set to"), report["neuron"]["flags"].items())
    yield _table(("variable", "here"), report["neuron"]["variables"].items())


def _verdict(wanted: str, version: str | None) -> tuple[str, str, str]:
    if version is None:
        return wanted, "not installed", ""
    return wanted, version, "ok" if is_supported(version, wanted) else "not supported"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
