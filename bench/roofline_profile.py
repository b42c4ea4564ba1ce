"""Write testing/profiles/expected*.json and roofline.json: times of every stage, released sizes.

    python -m bench.roofline_profile

Their times are those of `python -m bench.trn2.times`, TP=8. Expected: the likely time by the cost
model, and its low and high one; see bench/trn2/cost.py. Roofline: the floor, bytes that a call
reads over the published bandwidth of a core, or its FLOPs over the published peak, whichever takes
longer; no machine is that fast. A prompt is one call of its bucket. Nothing was measured.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from bench.trn2.counts import CountedGraph, count_graphs
from bench.trn2.times import SECONDS, saved_in_one_call_s
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from testing.command_line import parser_of
from testing.released import RELEASED
from testing.replaying.cases import PROFILES
from testing.replaying.profiles import StageLatency, StageProfile

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


# By profile: the column of bench.trn2.times, what its times are, and what they leave out.
PROFILES_MADE = {
    "expected-low": ("low", "low, by bench/trn2/cost.py"),
    "expected": ("likely", "likely, by bench/trn2/cost.py"),
    "expected-high": ("high", "high, by bench/trn2/cost.py"),
    "roofline": ("least", "floor by published bandwidth and peak, sums over the cores left out"),
}


def profile_of(graphs: Sequence[CountedGraph], tp: int, name: str) -> StageProfile:
    """Return a profile of counted graphs at one TP degree. name: of PROFILES_MADE.

    For each number of frames, a table has one time, that of the fewest streams.
    """
    column, meaning = PROFILES_MADE[name]
    stages = {}
    for stage, (graph_name, sizes, rule) in GRAPH_OF.items():
        times: dict[int, float] = {}
        for counted in graphs:
            if counted.graph.name != graph_name or counted.tp != tp:
                continue
            size = math.prod(counted.graph.size(axis) for axis in sizes)
            times.setdefault(size, SECONDS[column](counted))
        source = f"{graph_name}, {rule}, TP={tp}, on trn2"
        stages[stage] = StageLatency(stage, rule, tuple(sorted(times.items())), source)
    for stage in ("preprocessing", "driver_start", "driver_frame"):
        stages[stage] = StageLatency(stage, "line", ((0, 0.0),), "left out")
    source = (
        f"bench/roofline_profile.py: {meaning}, trn2 at TP={tp}, released sizes in "
        "bfloat16. Not measured."
    )
    named = {counted.graph.name: counted for counted in graphs if counted.tp == tp}
    saved_s = saved_in_one_call_s(column, named["code_predictor"], named["talker_decode"])
    return StageProfile(name, source, stages, saved_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the profiles, and print where."""
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
    graphs = count_graphs(RELEASED, plan, (Degrees.same(TP),))
    for name in PROFILES_MADE:
        out = PROFILES / f"{name}.json"
        profile_of(graphs, TP, name).save(out)
        print(out)


if __name__ == "__main__":
    main()
