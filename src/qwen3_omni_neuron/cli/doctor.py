"""`qwen3-omni-neuron doctor`: reports this machine and its versions, as Markdown for an issue.

It measures for two seconds how fast memory is read and numbers are multiplied, and derives from
that how fast the released model can be on this CPU.
"""

import argparse
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

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
    "talk": "`talk`",
    "video": "video files; sound in MP3, AAC, WMA, WebM, MP4, M4A and others",
    "heic": "HEIC pictures",
    "ray": "`serve --ray`",
}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the verb, which takes no arguments."""
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    """Print the report. Returns the exit status."""
    neuron = [*_torchneuron(), "", *_neuron(), "", *_neuron_target()]
    print("\n".join([*_versions(), "", *_extras(), "", *neuron, "", *_prompts(), "", *_machine()]))
    print("\n".join(["", *_fits(), "", *_speed()]))
    return 0


def _versions() -> list[str]:
    rows = [("python", platform.python_version()), (PACKAGE, PACKAGE_VERSION)]
    rows += [(name, installed_version(name) or "not installed") for name in LIBRARIES]
    return ["| package | version |", "| --- | --- |", *(f"| {n} | {v} |" for n, v in rows)]


def _extras() -> list[str]:
    """Return a table of the extras, and the command that installs what one lacks."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ["Missing extras are unknown: the package runs here without being installed."]
    lines = ["| extra | is for | missing | install |", "| --- | --- | --- | --- |"]
    for extra, use in EXTRAS.items():
        missing = missing_packages(required, extra)
        command = f"`pip install '{PACKAGE}[{extra}]'`" if missing else ""
        lines.append(f"| {extra} | {use} | {', '.join(missing) or 'nothing'} | {command} |")
    return lines


def _torchneuron() -> list[str]:
    """List the versions for target torchneuron, and its settings."""
    lines = _supported(f"target torchneuron (SDK {TORCHNEURON_SDK})", supported_torchneuron())
    lines += ["", "| setting | here | while it compiles, and in its ranks |", "| --- | --- | --- |"]
    for name in SHOWN:
        lines.append(f"| {name} | {os.environ.get(name, 'not set')} | {SETTINGS.get(name, '')} |")
    return lines


def _neuron_target() -> list[str]:
    version = installed_version("torch-neuronx")
    target = neuron_target(version)
    if target is None:
        return ["Neither Neuron target can run here: torch-neuronx is not installed."]
    return [f"Of the Neuron targets this environment is for {target}: torch-neuronx is {version}."]


def _supported(title: str, packages: Mapping[str, str | None]) -> list[str]:
    lines = [f"| for {title} | supported | installed | |", "| --- | --- | --- | --- |"]
    for name, supported in packages.items():
        version = installed_version(name)
        if supported is None:
            lines.append(f"| {name} | unknown | {version or 'not installed'} | |")
        elif version is None:
            lines.append(f"| {name} | {supported} | not installed | |")
        else:
            verdict = "ok" if is_supported(version, supported) else "not supported"
            lines.append(f"| {name} | {supported} | {version} | {verdict} |")
    return lines


def _neuron() -> list[str]:
    """List the versions for target neuron."""
    packages = supported_neuron()
    lines = _supported(f"target neuron (SDK {NEURON_SDK})", packages)
    if None in packages.values():
        lines += [
            "",
            f"Unknown: the metadata of {PACKAGE} says which versions are supported, and it runs "
            "here without being installed. Install it: pip install .",
        ]
    return lines


def _prompts() -> list[str]:
    """Return a table of the targets and whether they have a prefix cache."""
    cached = {True: "reused", False: "none: each prompt is computed anew"}
    rows = [(name, cached[target.limits.chunked_prefill]) for name, target in TARGETS.items()]
    return [
        "| target | rows of an earlier prompt |",
        "| --- | --- |",
        *(f"| {n} | {v} |" for n, v in rows),
    ]


def _machine() -> list[str]:
    devices = len(list(Path("/dev").glob("neuron[0-9]*")))
    rows = [
        ("system", platform.platform()),
        ("CPU", _cpu()),
        ("memory", _memory()),
        ("disk here", _disk()),
        ("steps in C", _native_library()),
        ("default port of `serve`", port_text(ServerSettings.port)),
        ("Neuron devices", str(devices) if devices else "none"),
        *((name, os.environ.get(name, "not set")) for name in NEURON_VARIABLES),
    ]
    return ["| machine | |", "| --- | --- |", *(f"| {n} | {v} |" for n, v in rows)]


def _fits() -> list[str]:
    """Return a table of what the released model takes on this CPU, and whether it fits."""
    try:
        from qwen3_omni_neuron.cpu.fits import fits_of, fits_text
        from qwen3_omni_neuron.cpu.memory import memory_bytes
    except (ImportError, OSError) as error:
        return [f"What fits the memory is unknown, as torch can't be imported ({error})."]
    from qwen3_omni_neuron.checkpoint.released import released_config

    fits = fits_of(released_config(), POSITIONS, TALKER_POSITIONS)
    title = "Qwen3-Omni-30B-A3B on this CPU (compile --dry-run --target cpu: for a checkpoint):"
    return [title, "", *fits_text(fits, memory_bytes())]


def _speed() -> list[str]:
    """Measure this CPU, and return what that lets the released model's replies take."""
    try:
        from qwen3_omni_neuron.cpu.call_cost import released_limits
        from qwen3_omni_neuron.cpu.fits import DTYPES
        from qwen3_omni_neuron.cpu.rates import measured_rates
        from qwen3_omni_neuron.cpu.target import predictor_numbers, usable_cores
    except (ImportError, OSError) as error:
        return [f"How fast this CPU is can't be measured, as torch can't be imported ({error})."]
    rates = measured_rates(usable_cores(), MEASURE_S)
    predictors = {dtype: predictor_numbers(dtype) for dtype in DTYPES}
    return speed_text(rates, released_limits(rates, predictors))


def speed_text(rates: "MachineRates", limits: "Mapping[str, CallSeconds]") -> list[str]:
    """Return what was measured, and a table of what follows from it for each dtype."""
    least, most = MEASURED_TIMES
    lines = [
        f"Measured, with {rates.threads} threads: {rates.bytes_per_s / GB:.1f} GB/s of memory are "
        f"read, and {rates.multiply_adds_per_s / GB:.1f} billion numbers a second multiplied.",
        "",
        "Derived from that, for a reply of Qwen3-Omni-30B-A3B with 50 tokens and 16 s of speech in "
        "a dtype that fits. Below RTF 1 speech is made faster than it plays. Expected: "
        f"{least} to {most} times the least time of its calls, as replies took that were measured "
        "(docs/benchmarks/released.md).",
        "",
        "| dtype | RTF at least (derived) | RTF expected (derived) | |",
        "| --- | ---: | ---: | --- |",
    ]
    for dtype, calls in limits.items():
        low, high = least * calls.rtf, most * calls.rtf
        verdict = "as it plays" if high < 1 else "slower than it plays" if low >= 1 else "close"
        lines.append(f"| {dtype} | {calls.rtf:.2f} | {low:.2f} to {high:.2f} | {verdict} |")
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
