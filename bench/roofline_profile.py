"""Writes profiles/roofline.json: the floor of every stage at the released sizes.

    python -m bench.roofline_profile

The floors are those of `compile --dry-run`: what a call reads over the published bandwidth of a
core, or computes over its published peak, whichever is longer, TP=8. Nothing was measured, sums
over the cores and the host are left out; no machine is that fast.
"""

from pathlib import Path

from bench.replaying.stage_profile import StageLatency, StageProfile
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.graphs.dry_run import DryRun, dry_run
from qwen3_omni_neuron.neuron.target import NEURON
from testing.released import RELEASED

OUT = Path(__file__).parent / "profiles" / "roofline.json"
TP = 8
WINDOW = 2048  # positions that a decode step reads
SLOTS = (1, 2, 4, 8)
# Each stage's graph, the sizes of it that count, and how a size in between is run.
GRAPH_OF = {
    "encoders": ("audio_encoder", ("windows",), "line"),
    "thinker_prefill": ("thinker_prefill", ("rows",), "bucket"),
    "thinker_decode": ("thinker_decode", ("slots",), "bucket"),
    "talker_prefill": ("talker_prefill", ("rows",), "bucket"),
    "talker_step": ("talker_decode", ("slots",), "bucket"),
    "code_predictor": ("code_predictor_sampled", ("slots",), "bucket"),
    "code2wav_start": ("code2wav_start", ("streams", "frames"), "line"),
    "code2wav_step": ("code2wav_step", ("streams", "frames"), "line"),
}


def roofline(run: DryRun, tp: int) -> StageProfile:
    """The profile of a dry run that has this TP degree. A table has each number of frames once:
    as the fewest streams decode it."""
    stages = {}
    for stage, (name, sizes, rule) in GRAPH_OF.items():
        floors: dict[int, float] = {}
        for planned in run.graphs:
            if planned.graph.name != name or planned.tp != tp:
                continue
            size = 1
            for axis in sizes:
                size *= planned.graph.size(axis)
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


def main() -> None:
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
