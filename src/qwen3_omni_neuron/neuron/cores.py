"""The logical cores of each stage, and the environment variables that select them.

With placement "split" a stage has as many cores as its parts' largest degree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from qwen3_omni_neuron.errors import OptionError

PHYSICAL_CORES = {"trn2.48xlarge": 128, "trn2u.48xlarge": 128, "trn2.3xlarge": 8}
CHIP_CORES = 8  # physical ones of a trn2, which share its memory evenly
CHIP_BYTES = 96 * 2**30
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")


@dataclass(frozen=True)
class CorePlan:
    """The first and last logical core of each stage, inclusive."""

    instance: str
    placement: str
    lnc: int
    ranges: Mapping[str, tuple[int, int]]

    def environment(self, stage: str) -> dict[str, str]:
        """Return a stage process's variables."""
        return {
            "NEURON_RT_VISIBLE_CORES": _format_range(self.ranges[stage]),
            "NEURON_LOGICAL_NC_CONFIG": str(self.lnc),
        }


def plan_cores(
    instance: str,
    placement: str,
    needed: Mapping[str, int],
    lnc: int = 2,
    cores: Mapping[str, str] | None = None,
) -> CorePlan:
    """Plan the cores of every stage, from core 0 on, or as in `cores`.

    needed: see compilation.plan.cores_of_stages. cores: e.g. "8-15" or "16", for all stages or
    none. Raises OptionError.
    """
    if instance not in PHYSICAL_CORES:
        raise OptionError(
            f"instance must be one of {', '.join(PHYSICAL_CORES)}, got {instance!r}: its cores are "
            "unknown."
        )
    if placement == "shared":
        needed = dict.fromkeys(needed, max(needed.values()))
    if cores is not None:
        ranges = _ranges(cores, list(needed))
    else:
        ranges, start = {}, 0
        for stage, count in needed.items():
            ranges[stage] = (start, start + count - 1)
            if placement == "split":
                start += count
    plan = CorePlan(instance, placement, lnc, ranges)
    _check(plan, needed, PHYSICAL_CORES[instance] // lnc)
    return plan


def core_bytes(lnc: int) -> float:
    """Return the memory of a logical core of a trn2."""
    return CHIP_BYTES * lnc / CHIP_CORES


def instance_type(product_name: Path = PRODUCT_NAME) -> str:
    """Return this machine's instance type. Raises OptionError for an unknown one."""
    try:
        found = product_name.read_text(encoding="utf-8").strip()
    except OSError as error:
        found = f"nothing ({error})"
    if found not in PHYSICAL_CORES:
        raise OptionError(
            f"{product_name} says {found}, which is not a known instance type. Set instance to one "
            f"of {', '.join(PHYSICAL_CORES)}."
        )
    return found


def _ranges(cores: Mapping[str, str], stages: Sequence[str]) -> dict[str, tuple[int, int]]:
    if cores.keys() != set(stages):
        raise OptionError(
            f"cores names {', '.join(cores) or 'no stage'}; it must name all of "
            f"{', '.join(stages)}."
        )
    return {stage: _range(stage, cores[stage]) for stage in stages}


def _range(stage: str, text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
        raise OptionError(f'cores of the {stage} must be like "8-15" or "8", got {text!r}.')
    return int(first), int(last or first)


def _check(plan: CorePlan, needed: Mapping[str, int], available: int) -> None:
    listed = ", ".join(f"{stage} {_format_range(cores)}" for stage, cores in plan.ranges.items())
    for stage, (first, last) in plan.ranges.items():
        count = needed[stage]
        if last - first + 1 != count:
            raise OptionError(
                f"the {stage} has cores {first}-{last}, {last - first + 1} of them, but its graphs "
                f"were compiled for {count}. Give it {count}, or compile with another --tp."
            )
    if plan.placement == "shared" and len(set(plan.ranges.values())) > 1:
        raise OptionError(
            f"with placement shared one process has all stages, on the same cores, got {listed}. "
            "Give them the same, or use placement split."
        )
    if plan.placement == "split":
        ordered = sorted(plan.ranges.items(), key=lambda item: item[1])
        for (one, (_, end)), (other, (start, _)) in pairwise(ordered):
            if start <= end:
                raise OptionError(
                    f"{one} and {other} share core {start} ({listed}), but a core belongs to one "
                    "process. Give each stage its own cores, or use placement shared."
                )
    if max(last for _, last in plan.ranges.values()) >= available:
        raise OptionError(
            f"{plan.instance} has {available} logical cores at LNC={plan.lnc}, 0 to "
            f"{available - 1}, got {listed}. Name other cores, use placement shared or a larger "
            "instance, or compile with a smaller tp."
        )


def _format_range(cores: tuple[int, int]) -> str:
    first, last = cores
    return str(first) if first == last else f"{first}-{last}"
