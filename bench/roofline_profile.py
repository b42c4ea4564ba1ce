"""Write testing/profiles/roofline.json: the floor of every stage at the released sizes.

    python -m bench.roofline_profile

The floors are those of `compile --dry-run`, TP=8: bytes that a call reads over the published
bandwidth of a core, or its FLOPs over the published peak, whichever takes longer. Nothing was
measured; sums over the cores and host time are left out, so no machine is that fast.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.neuron.graphs.dry_run import DryRun, dry_run
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from testing.command_line import parser_of
from testing.released import RELEASED
from testing.replaying.cases import PROFILES
from testing.replaying.profiles import StageLatency, StageProfile

OUT = PROFILES / "roofline.json"
TP = 8
WINDOW = 2048  # positions that a decode step reads
SLOTS = (1, 2, 4, 8)
# Each stage's graph, the axes that make its size, and the rule for sizes in between.
GRAPH_OF = {
    "encoders": ("audio_encoder", ("windows",), "line"),
    "thinker_prefill": ("thinker_prefill", ("rows",), "bucket"),
    "thinker_decode": ("thinker_decode", ("slots",), "bucket"),
    "talker_prefill": ("talker_prefill", ("rows",), "bucket"),
    "talker_step": ("talker_decode", ("slots",), "bucket"),
    "code_predictor": ("code_predictor", ("slots",), "bucket"),
    "code2wav_start": ("code2wav", ("streams", "frames"), "line"),
    "code2wav_step": ("code2wav", ("streams", "frames"), "line"),
}


def roofline(run: DryRun, tp: int) -> StageProfile:
    """Return the profile of a dry run at one TP degree.

    For each number of frames, a table has one time, that of the fewest streams.
    """
    stages = {}
    for stage, (name, sizes, rule) in GRAPH_OF.items():
        floors: dict[int, float] = {}
        for planned in run.graphs:
            if planned.graph.name != name or planned.tp != tp:
                continue
            size = math.prod(planned.graph.size(axis) for axis in sizes)
            floors.setdefault(size, planned.floor_s)
        source = f"floor of {name}, {rule}, TP={tp}, on {run.chip.name}"
        stages[stage] = StageLatency(stage, rule, tuple(sorted(floors.items())), source)
    for stage in ("preprocessing", "driver_start", "driver_frame"):
        stages[stage] = StageLatency(stage, "line", ((0, 0.0),), "the host is left out")
    return StageProfile(
        "roofline",
        f"bench/roofline_profile.py: published bandwidth and peak of {run.chip.name} at TP={tp}, "
        "released sizes in bfloat16, sums over the cores left out. Not measured.",
        stages,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the profile, and print where."""
    parser_of("roofline_profile", __doc__).parse_args(arguments)
    plan = make_plan(
        Path("Qwen3-Omni"),
        RELEASED,
        NEURON.limits,
        max_concurrency=SLOTS[-1],
        context_length=8192,
        talker_context_length=8192,
        prompt_buckets=(512, 2048),
        decode_buckets=(WINDOW,),
        patch_buckets=(1024,),
        batches=SLOTS,
    )
    roofline(dry_run(RELEASED, plan, degrees=(TP,)), TP).save(OUT)
    print(OUT)


if __name__ == "__main__":
    main()
