"""A pytest plugin: which proofs a run has left out, and the commands that run them."""

from collections.abc import Generator, Iterable, Mapping

import pytest

from testing.repeats import left_out

# Keys: text that a skip's reason contains.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "torch_xla is not installed": ("graphs lowered to HLO", "make test-hlo"),
    "torch-mlir is not installed": ("graphs imported into torch-mlir", "make test-import"),
    "no public TorchNeuron": (
        "an early public TorchNeuron's own passes over the graphs",
        "make test-torchneuron TORCHNEURON_SOURCES=...",
    ),
    "neuronx_distributed": ("NxDI's own code in its CPU mode", "make test-nxdi NXDI_SOURCES=..."),
    "NxDI can't be imported": (
        "NxDI's own code in its CPU mode",
        "make test-nxdi NXDI_SOURCES=...",
    ),
    "no kernel library": (
        "checks of the kernels that NxDI calls",
        "make test-nxdi NXDI_SOURCES=... NKILIB_SOURCES=...",
    ),
    "which packs matrices": ("matrices as other packages pack them", "make test-quantised"),
    "peft is not installed": ("adapters that PEFT itself writes and merges", "make test"),
    "which reads this form": ("quantised checkpoints in transformers", "make test-quantised"),
    "which has a client's packages": ("stock clients of OpenAI's API", "make test-clients"),
    "4.57": ("what transformers 4.57 can't do", "make test"),
    "5.x takes": ("what transformers 5 can't do", "make test-oracle"),
    "no C compiler": ("what runs in C", "install a C compiler, make clean, make test"),
    "the C was not compiled": ("what runs in C", "install a C compiler, make clean, make test"),
    "the C by another compiler": (
        "the C by other compilers, and on 64-bit ARM",
        "install the packages that .ci/test-aarch64 names, make test-aarch64",
    ),
    "on PATH": ("the report's page in a browser", "install chromium, make test"),
    "playwright is not installed": ("the page that people talk to", "make test"),
    "there is no Chromium": ("the page that people talk to", "make chromium, make test"),
    "only root may mount": ("a disk that is really full", "make test, as root"),
    "which Linux has": ("memory and files as Linux counts them", "make test, on Linux"),
    "/proc": ("memory and files as Linux counts them", "make test, on Linux"),
    "malloc is not glibc's": ("memory and files as Linux counts them", "make test, on Linux"),
    "as Linux does": ("memory and files as Linux counts them", "make test, on Linux"),
    "a Ray cluster of its own": ("replicas in a Ray cluster, and their failures", "make test-ray"),
    "a Ray cluster that scales": ("Ray that replaces and adds replicas", "make test-scaling"),
    "17 GB of disk": ("every released width, against transformers", "make test-wide"),
    "which stands before the server": ("slow and malformed HTTP", "make nginx, make test"),
    "which checks deploy/": (
        "images, manifests, proxies and the systemd unit by their own tools",
        "make test-deploy, with systemd and Debian's nginx, caddy and docker-compose",
    ),
    "pipecat-ai is not installed": (
        "Smart Turn's own model",
        "pip install '.[smart-turn]' into an environment of its own, pytest",
    ),
    "takes compilers for other platforms": ("the wheels of a release", "make wheels"),
    "which would load the wheel's library": (
        "the wheel on a Python that is not here",
        "install that Python, make wheels",
    ),
    "pip asks a registry": ("extras that resolve together", "make test-extras"),
    "this PyAV": ("a codec or rotation of videos", "another PyAV, make test"),
}
# Reasons of skips that leave nothing out: the case does not exist there.
HARMLESS = (
    "the Neuron SDK, or its sources, are here",
    "the reference gives all videos of a prompt one frame rate",
)


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each proof that skipped tests have left out, most tests first.

    reasons: one for each skipped test. A reason without a command here is printed as it is.
    """
    counts: dict[tuple[str, str], int] = {}
    for reason in reasons:
        if any(text in reason for text in HARMLESS):
            continue
        known = (what for text, what in COMMANDS.items() if text in reason)
        proof = next(known, (reason, "no command: see testing/not_run.py"))
        counts[proof] = counts.get(proof, 0) + 1
    rows = sorted(counts.items(), key=lambda row: -row[1])
    return [f"{number:5d} skipped: {what}. To run: {command}" for (what, command), number in rows]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own list of skipped tests
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Print the summary at the end of a run."""
    yield
    # A skipped test's report has (file, line, "Skipped: REASON").
    skipped = terminalreporter.stats.get("skipped", [])
    lines = summary(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if number := left_out(terminalreporter.config):
        lines.append(
            f"{number:5d} left out: shown by others, too, or for a release. To run: make test-all"
        )
    if lines:
        terminalreporter.section("not run here")
        terminalreporter.write("\n".join(lines) + "\n")
