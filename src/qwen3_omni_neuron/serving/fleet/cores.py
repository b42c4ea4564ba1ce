"""Assignment of a replica's NeuronCores to its stages.

Ray counts logical cores, which the operator declares when a node starts
(`--resources='{"neuron_cores": 64}'`, a trn2.48xlarge at LNC=2), and gives each replica its own.

    neuron_cores   needed    placement   thinker   talker   vocoder      given cores 8, 9, ...
    8              8, 8, 1   shared      8-15      8-15     8-15
    20             8, 8, 1   split       8-15      16-23    24

A stage needs as many as its parts' largest degree in the compiled tree. Excess cores stay idle, so
that a replica can begin on its own chip, of 4 cores.
"""

from collections.abc import Mapping, Sequence

from qwen3_omni_neuron.errors import OptionError

RESOURCE = "neuron_cores"


def stage_cores(
    given: Sequence[int], wanted: int, placement: str, needed: Mapping[str, int]
) -> dict[str, str] | None:
    """Return each stage's cores for Qwen3Omni.load; None for no cores.

    given: cores assigned by Ray. wanted: number in the settings. needed: number per stage
    (compilation.tree.needed_cores), empty without a tree. Raises OptionError if they are too few,
    or a stage's are not contiguous.
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
        raise OptionError(
            f"{len(given)} {RESOURCE} are too few with placement {placement}: the compiled graphs "
            f"need {total} ({', '.join(f'{stage} {n}' for stage, n in needed.items())})."
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
