"""NeuronCores of a replica: check that a node has enough, and assignment to stages.

Ray counts logical cores, which the operator declares when a node starts
(`--resources='{"neuron_cores": 64}'`, a trn2.48xlarge at LNC=2), and gives each replica its own.

    neuron_cores   tp   placement   thinker   talker   vocoder      given cores 8, 9, ...
    8              8    shared      8-15      8-15     8-15
    24             8    split       8-15      16-23    24-31
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
    given: Sequence[int], wanted: int, placement: str, stages: Sequence[str]
) -> dict[str, str] | None:
    """Return each stage's cores for Qwen3Omni.load; None for no cores.

    given: cores that Ray assigned to this replica. wanted: number of cores in the settings.
    Raises OptionError if they don't divide among the stages, or are not contiguous.
    """
    if len(given) != wanted:
        raise OptionError(
            f"the settings ask for {wanted} {RESOURCE} a replica, and Ray has given {len(given)}. "
            f"Leave {RESOURCE} out of ray_actor_options: the settings put it there."
        )
    if not given:
        return None
    parts = len(stages) if placement == "split" else 1
    if len(given) % parts:
        raise OptionError(
            f"{len(given)} {RESOURCE} can't be divided among {parts} stages, which have as many "
            f"each. Ask for {len(given) // parts * parts or parts} or "
            f"{(len(given) // parts + 1) * parts}, or take placement shared."
        )
    each, ordered = len(given) // parts, sorted(given)
    ranges = []
    for start in range(0, len(ordered), each):
        own = ordered[start : start + each]
        if own[-1] - own[0] != each - 1:
            raise OptionError(
                f"a stage needs {each} {RESOURCE} in a row, and Ray has given "
                f"{', '.join(map(str, own))}. Let all applications of a node ask for the same "
                "number, or for multiples of one."
            )
        ranges.append(f"{own[0]}-{own[-1]}" if each > 1 else str(own[0]))
    return {stage: ranges[number if parts > 1 else 0] for number, stage in enumerate(stages)}
