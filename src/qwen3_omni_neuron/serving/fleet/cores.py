"""NeuronCores of a replica: check that a node has enough, and assignment to stages.

Ray counts logical cores, which the operator declares when a node starts
(`--resources='{"neuron_cores": 64}'`, a trn2.48xlarge at LNC=2), and gives each replica its own.

    neuron_cores   needed    placement   thinker   talker   vocoder      given cores 8, 9, ...
    8              8, 8, 1   shared      8-15      8-15     8-15
    20             8, 8, 1   split       8-15      16-23    24

A stage needs as many as the largest degree of its parts in the compiled tree. More cores than all
need are left idle: so a replica can begin on a chip of its own, which has 4.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qwen3_omni_neuron.errors import OptionError

RESOURCE = "neuron_cores"
FIRST_NODE_S = 600.0


def check_nodes(
    wanted: int,
    list_nodes: Callable[[], Iterable[Mapping[str, Any]]],
    first_node_s: float = FIRST_NODE_S,
) -> None:
    """Check that a node of the cluster has the cores that a replica needs.

    list_nodes: `ray.nodes`. first_node_s: time for the first node with cores to join, as
    applications may be deployed before the workers of a cluster have started. Raises OptionError
    with both numbers; Ray itself would wait for such a node for ever.
    """
    until_s = time.monotonic() + first_node_s
    while True:
        have = [int(n["Resources"].get(RESOURCE, 0)) for n in list_nodes() if n["Alive"]]
        most = max(have, default=0)
        if wanted <= most:
            return
        if most or time.monotonic() >= until_s:
            break
        time.sleep(1.0)
    raise OptionError(
        f"a replica asks for {wanted} {RESOURCE}, and the largest of {len(have)} nodes has "
        f"{most}. Ask for at most {most}, or start a larger node; where it has them, begin it "
        f"with `ray start --resources='{{\"{RESOURCE}\": {wanted}}}'`, in logical cores."
    )


def stage_cores(
    given: Sequence[int], wanted: int, placement: str, needed: Mapping[str, int]
) -> dict[str, str] | None:
    """Return each stage's cores for Qwen3Omni.load; None for no cores.

    given: cores that Ray assigned to this replica. wanted: number of cores in the settings.
    needed: number that each stage needs, see compilation.tree.needed_cores; empty without a tree,
    when the model runs on the CPU.
    Raises OptionError if they are too few, or those of a stage are not contiguous.
    """
    if len(given) != wanted:
        raise OptionError(
            f"the settings ask for {wanted} {RESOURCE} a replica, and Ray has given {len(given)}. "
            f"Leave {RESOURCE} out of ray_actor_options: the settings put it there."
        )
    if not given or not needed:
        return None
    split, most = placement == "split", max(needed.values())
    total = sum(needed.values()) if split else most
    if len(given) < total:
        listed = ", ".join(f"{stage} {count}" for stage, count in needed.items())
        raise OptionError(
            f"{len(given)} {RESOURCE} are too few with placement {placement}: the compiled graphs "
            f"need {total} ({listed}). Ask for {total}"
            + (f", or take placement shared, which needs {most}." if split else ".")
        )
    ordered, ranges, start = sorted(given), {}, 0
    for stage, own_count in needed.items():
        count = own_count if split else most
        own = ordered[start : start + count]
        if own[-1] - own[0] != count - 1:
            raise OptionError(
                f"the {stage} needs {count} {RESOURCE} in a row, and Ray has given "
                f"{', '.join(map(str, own))}. Let all applications of a node ask for the same "
                "number, or for multiples of one."
            )
        ranges[stage] = f"{own[0]}-{own[-1]}" if count > 1 else str(own[0])
        start += count if split else 0
    return ranges
