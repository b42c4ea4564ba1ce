"""`qwen3-omni-neuron doctor`: reports this machine and its versions, as Markdown for an issue.

The first line is a verdict; what a laptop needs comes before what Neuron needs.

It measures for two seconds how fast memory is read and numbers are multiplied, and derives from
that how fast the released model can be on this CPU.
"""

import argparse
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.cli.parsing import CommandParser
from qwen3_omni_neuron.compilation.versions import (
    LIBRARIES,
    PACKAGE,
    PACKAGE_VERSION,
    installed_version,
    missing_packages,
)
from qwen3_omni_neuron.loading import TARGETS
from qwen3_omni_neuron.neuron.torchneuron.environment import SETTINGS, SHOWN
from qwen3_omni_neuron.neuron.versions import (
    NEURON_SDK,
    TORCHNEURON_SDK,
    is_supported,
    neuron_target,
    supported_neuron,
    supported_torchneuron,
)
from qwen3_omni_neuron.serving.settings import ServerSettings

if TYPE_CHECKING:
    from qwen3_omni_neuron.cpu.call_cost import CallSeconds
    from qwen3_omni_neuron.cpu.rates import MachineRates

RELEASED = "Qwen3-Omni-30B-A3B"
TORCHNEURON, NEURON = "torchneuron", "neuron"  # targets
NEURON_VARIABLES = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG")
GB = 1e9
# The conversation in the table of what fits: positions of the thinker and of the talker.
POSITIONS, TALKER_POSITIONS = 4096, 4096 + 1024
MEASURE_S = 2.0
# Times that measured replies took of the least time of their calls: from 0.96 to 1.79 on the two
# machines of docs/benchmarks/released.md.
MEASURED_TIMES = 1.0, 1.8
EXTRAS = {
    "serve": "`serve`",
    "realtime": "turns that `/v1/realtime` finds by itself",
    "smart-turn": "`semantic_vad`",
    "video": "video files; sound in MP3, AAC, WMA, WebM, MP4, M4A and others",
    "heic": "HEIC pictures",
    "ray": "`serve --ray`",
    "completion": "`completion`",
}


def add_doctor(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_doctor)
    parser.add_examples("doctor", "doctor --json")
    parser.add_argument("--json", action="store_true", help="print a line of JSON")


def _doctor(parsed: argparse.Namespace) -> int:
    """Print the report. Returns the exit status."""
    report = _report()
    shown = _text(report, report["cpu"].pop("text", []))
    print(json.dumps(report) if parsed.json else "\n".join(shown))
    return 0


def _report() -> dict[str, Any]:
    """Collect what is found, measured and derived; the verdict comes first."""
    cpu = _cpu_report()
    neuron = _neuron_report()
    return {
        "verdict": verdict(cpu, neuron["devices"], neuron["target"]),
        "machine": _machine(),
        "packages": {"python": platform.python_version(), PACKAGE: PACKAGE_VERSION}
        | {name: installed_version(name) for name in LIBRARIES},
        "extras": _extras(),
        "cpu": cpu,
        "neuron": neuron,
    }


def verdict(cpu: Mapping[str, Any], devices: int, target: str | None) -> str:
    """Say in one sentence whether this machine runs the released model, and how fast.

    cpu: see _cpu_report. devices, target: number of Neuron devices, and the target that is
    installed for them.
    """
    if devices:
        ready = f"and target {target} is installed" if target else "and no Neuron SDK is installed"
        return f"There are {devices} Neuron devices, {ready}: see docs/trn2.md."
    if "error" in cpu:
        return f"No model can run here, as torch can't be imported ({cpu['error']})."
    fitting = [name for name, fit in cpu["dtypes"].items() if fit["conversations"]]
    if not fitting:
        name, least = min(cpu["dtypes"].items(), key=lambda pair: pair[1]["memory_gb"])
        return (
            f"{RELEASED} does not fit this machine: {name} takes {least['memory_gb']:.1f} GB of "
            f"memory, of {cpu['memory_gb']:.1f}. The small model that ships runs."
        )
    best = min(fitting, key=lambda name: cpu["dtypes"][name]["rtf_expected"])
    low, high = cpu["dtypes"][best]["rtf_expected"]
    return (
        f"{RELEASED} runs on this CPU with --dtype {best}, {_pace(low, high)}: RTF {low:.1f} to "
        f"{high:.1f} expected (seconds of work for a second of speech)."
    )


def _text(report: Mapping[str, Any], cpu_text: Sequence[str]) -> list[str]:
    """Return the report as Markdown. cpu_text: the part of it about the CPU."""
    neuron = report["neuron"]
    lines = [report["verdict"], "", *_table(("machine", ""), report["machine"].items())]
    packages = [(name, version or "not installed") for name, version in report["packages"].items()]
    lines += ["", *_table(("package", "version"), packages), "", *_extras_text(report["extras"])]
    lines += ["", *cpu_text] if cpu_text else []
    lines += ["", "## Neuron", "", neuron["verdict"]]
    for name, sdk in ((TORCHNEURON, TORCHNEURON_SDK), (NEURON, NEURON_SDK)):
        lines += ["", *_supported(f"target {name} (SDK {sdk})", neuron["packages"][name])]
    if None in [one["supported"] for one in neuron["packages"][NEURON].values()]:
        lines += [
            "",
            f"Unknown: the metadata of {PACKAGE} says which versions are supported, and it runs "
            "here without being installed. Install it: pip install .",
        ]
    settings = [(n, os.environ.get(n, "not set"), SETTINGS.get(n, "")) for n in SHOWN]
    heading = ("setting", "here", "while it compiles, and in its ranks")
    lines += ["", *_table(heading, settings)]
    return [*lines, "", *_table(("variable", "here"), neuron["variables"].items()), "", *_prompts()]


def _table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(map(str, line))} |".replace("|  |", "| |") for line in lines]


def _extras() -> dict[str, Any] | None:
    """Return what each extra is for and lacks, and the command that installs it.

    None where the package is not installed, which then has no metadata.
    """
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = {}
    for extra, use in EXTRAS.items():
        missing = missing_packages(required, extra)
        command = f"pip install '{PACKAGE}[{extra}]'" if missing else None
        found[extra] = {"for": use, "missing": missing, "install": command}
    return found


def _extras_text(extras: Mapping[str, Any] | None) -> list[str]:
    if extras is None:
        return ["Missing extras are unknown: the package runs here without being installed."]
    rows = []
    for name, one in extras.items():
        command = f"`{one['install']}`" if one["install"] else ""
        rows.append((name, one["for"], ", ".join(one["missing"]) or "nothing", command))
    return _table(("extra", "is for", "missing", "install"), rows)


def _neuron_report() -> dict[str, Any]:
    """Return devices, versions and variables of Neuron, and which target the environment is for."""
    version = installed_version("torch-neuronx")
    target = neuron_target(version)
    supported: dict[str, Mapping[str, str | None]] = {
        TORCHNEURON: dict(supported_torchneuron()),
        NEURON: supported_neuron(),
    }
    return {
        "devices": _devices(),
        "target": target,
        "verdict": "Neither Neuron target can run here: torch-neuronx is not installed."
        if target is None
        else f"Of the Neuron targets this environment is for {target}: torch-neuronx is {version}.",
        "packages": {
            name: {
                package: {"supported": wanted, "installed": installed_version(package)}
                for package, wanted in packages.items()
            }
            for name, packages in supported.items()
        },
        "variables": {name: os.environ.get(name, "not set") for name in NEURON_VARIABLES},
    }


def _supported(title: str, packages: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    rows = []
    for name, one in packages.items():
        supported, version, said = one["supported"], one["installed"], ""
        if supported is not None and version is not None:
            said = "ok" if is_supported(version, supported) else "not supported"
        rows.append((name, supported or "unknown", version or "not installed", said))
    return _table((f"for {title}", "supported", "installed", ""), rows)


def _prompts() -> list[str]:
    """Return a table of the targets and whether they have a prefix cache."""
    cached = {True: "reused", False: "none: each prompt is computed anew"}
    rows = [(name, cached[target.limits.chunked_prefill]) for name, target in TARGETS.items()]
    return _table(("target", "rows of an earlier prompt"), rows)


def _devices() -> int:
    """Return the number of this machine's Neuron devices."""
    return len(list(Path("/dev").glob("neuron[0-9]*")))


def _machine() -> dict[str, str]:
    devices = _devices()
    return {
        "system": platform.platform(),
        "CPU": _cpu(),
        "memory": _memory(),
        "disk here": _disk(),
        "steps in C": _native_library(),
        "default port of `serve`": port_text(ServerSettings.port),
        "Neuron devices": str(devices) if devices else "none",
    }


def _cpu_report() -> dict[str, Any]:
    """Measure this CPU. Returns what the released model takes on it, and how fast it would be.

    dtypes: for each dtype its memory and how many conversations fit, and its RTF, derived and to be
    expected; text: the same as Markdown. Where torch can't be imported, "error" alone.
    """
    try:
        from qwen3_omni_neuron.cpu.call_cost import released_limits
        from qwen3_omni_neuron.cpu.fits import DTYPES, fits_of, fits_text
        from qwen3_omni_neuron.cpu.memory import memory_bytes
        from qwen3_omni_neuron.cpu.rates import measured_rates
        from qwen3_omni_neuron.cpu.target import predictor_numbers, usable_cores
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    from qwen3_omni_neuron.checkpoint.released import released_config

    memory = memory_bytes()
    fits = fits_of(released_config(), POSITIONS, TALKER_POSITIONS)
    rates = measured_rates(usable_cores(), MEASURE_S)
    limits = released_limits(rates, {dtype: predictor_numbers(dtype) for dtype in DTYPES})
    title = f"{RELEASED} on this CPU (compile --dry-run --target cpu: for a checkpoint):"
    return {
        "memory_gb": memory / GB,
        "measured": asdict(rates),
        "dtypes": {
            fit.dtype: {
                "memory_gb": fit.memory_bytes() / GB,
                "conversations": fit.slots(memory),
                "longest_positions": fit.longest(memory),
                "rtf_least": limits[fit.dtype].rtf,
                "rtf_expected": [times * limits[fit.dtype].rtf for times in MEASURED_TIMES],
            }
            for fit in fits
        },
        "text": [title, "", *fits_text(fits, memory), "", *speed_text(rates, limits)],
    }


def _pace(low: float, high: float) -> str:
    """Say how speech of an RTF from low to high compares with its playback."""
    return "as it plays" if high < 1 else "slower than it plays" if low >= 1 else "close"


def speed_text(rates: "MachineRates", limits: "Mapping[str, CallSeconds]") -> list[str]:
    """Return what was measured, and a table of what follows from it for each dtype."""
    least, most = MEASURED_TIMES
    lines = [
        f"Measured, with {rates.threads} threads: {rates.bytes_per_s / GB:.1f} GB/s of memory are "
        f"read, and {rates.multiply_adds_per_s / GB:.1f} billion numbers a second multiplied.",
        "",
        f"Derived from that, for a reply of {RELEASED} with 50 tokens and 16 s of speech in "
        "a dtype that fits. Below RTF 1 speech is made faster than it plays. Expected: "
        f"{least} to {most} times the least time of its calls, as replies took that were measured "
        "(docs/benchmarks/released.md).",
        "",
        "| dtype | RTF at least (derived) | RTF expected (derived) | |",
        "| --- | ---: | ---: | --- |",
    ]
    for dtype, calls in limits.items():
        low, high = least * calls.rtf, most * calls.rtf
        pace = _pace(low, high)
        lines.append(f"| {dtype} | {calls.rtf:.2f} | {low:.2f} to {high:.2f} | {pace} |")
    return lines


def port_text(port: int) -> str:
    """Say whether a port of the loopback is free."""
    with closing(socket.socket()) as listener:
        # As servers bind: connections that ended a minute ago do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return f"{port} can't be used ({error.strerror}): give `serve --port` another one"
    return f"{port} is free"


def _native_library() -> str:
    """Say whether the C library runs. The check imports torch, which may be broken."""
    try:
        from qwen3_omni_neuron.cpu.native.installed import library_verdict
    except (ImportError, OSError) as error:
        return f"unknown, as torch can't be imported ({error})"
    return library_verdict()


def _cpu() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


def _memory() -> str:
    """Return the memory in GB, converted from KiB in /proc."""
    found = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= found.keys():
        return "unknown"
    total, free = (int(found[n].split()[0]) * 1024 / GB for n in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GB, {free:.1f} GB available"


def _disk() -> str:
    usage = shutil.disk_usage(".")
    return f"{usage.total / GB:.1f} GB, {usage.free / GB:.1f} GB free"


def _lines(path: Path) -> list[str]:
    """Return a file's lines, or no lines where the file does not exist."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
