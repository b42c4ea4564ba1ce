"""Degrees of tensor parallelism: how they are given, and defaults that are the cheapest."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.trn2.cost import UNPUBLISHED, CountingGroup, graph_cost
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.manifest import Origin
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODEL_STAGES, MODELS, cores_of_stages
from qwen3_omni_neuron.compilation.target import CoreRequest
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.memory import core_memory, placement
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from testing.released import RELEASED
from testing.specs import plan_of

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks" / "trn2.md").read_text(encoding="utf-8")
MIXED = Degrees(thinker=8, talker=4, predictor=1, vocoder=2, encoders=1)


def test_degrees_are_a_number_or_numbers_of_parts() -> None:
    for given, degrees in (
        (8, Degrees.same(8)),
        ("8", Degrees.same(8)),
        ("thinker=8,talker=4,predictor=1,vocoder=2,encoders=1", MIXED),
        ("encoders=1,thinker=8,vocoder=2", replace(MIXED, talker=2, predictor=2)),
        (MIXED, MIXED),
    ):
        assert Degrees.parse(given, Degrees.same(2)) == degrees  # type: ignore[arg-type]


def test_a_part_has_its_models_degree_and_a_stage_as_many_cores_as_its_parts() -> None:
    plan = plan_of(Path(), RELEASED, "torchneuron", tp=str(MIXED))
    by_model = {
        "thinker": 8, "vision": 1, "audio": 1, "talker": 4, "code_predictor": 1, "code2wav": 2,
    }  # fmt: skip
    for model, parts in MODEL_PARTS.items():
        assert {plan.degree(part) for part in parts} == {by_model[model]}
    needed = cores_of_stages(plan.tp, ("thinker", "talker", "vocoder"))
    assert needed == {"thinker": 8, "talker": 4, "vocoder": 2}
    for stage, count in needed.items():
        assert count == max(by_model[model] for model in MODELS if MODEL_STAGES[model] == stage)


def test_a_part_is_on_one_core_of_its_stage_or_on_all() -> None:
    for tp, said in (
        ("thinker=8,encoders=4", "has the vision on 4 of the 8 cores of thinker, .* Use 1 or 8."),
        ("thinker=2,encoders=8", "has the thinker on 2 of the 8 cores of thinker"),
        ("talker=4,predictor=2", "has the code_predictor on 2 of the 4 cores of talker"),
    ):
        with pytest.raises(OptionError, match=said):
            plan_of(Path(), RELEASED, "torchneuron", tp=tp)


def test_stages_on_the_same_cores_have_parts_on_one_or_on_all() -> None:
    plan = plan_of(Path(), RELEASED, "torchneuron", tp=str(MIXED))
    request = CoreRequest("split", ("thinker", "talker", "vocoder"), "trn2.48xlarge")
    assert len(TORCHNEURON.environments(plan, request)) == 3
    said = "talker on 4 of the 8 cores of thinker and talker and vocoder, .* or placement split"
    with pytest.raises(OptionError, match=said):
        TORCHNEURON.environments(plan, replace(request, placement="shared"))
    assert placement(core_memory(RELEASED, plan, (MIXED,)), MIXED, "trn2.48xlarge")[0] == "split"
    small = replace(MIXED, thinker=4, talker=2)
    fits, why = placement(core_memory(RELEASED, plan, (small,)), small, "trn2.3xlarge")
    assert fits is None and "talker on 2 of the 4 cores" in why


def test_another_degree_makes_no_other_model_stale() -> None:
    """A resumed compile compiles that one alone. Each record has one number, as it always had."""
    one, other = (
        plan_of(Path(), RELEASED, "torchneuron", tp=str(replace(MIXED, predictor=degree)))
        for degree in (1, 4)
    )
    stale = {
        model: Origin("", one.model_settings(model), {}).difference(
            Origin("", other.model_settings(model), {})
        )
        for model in MODELS
    }
    assert {model: said for model, said in stale.items() if said} == {
        "code_predictor": "tp 1 instead of 4"
    }


# By part, of those with calls while a reply is made; the encoders' take 8 s of sound and a picture.
NAMES = {
    "thinker": "thinker", "talker": "talker", "code_predictor": "predictor", "code2wav": "vocoder",
    "audio_encoder": "encoders", "vision_encoder": "encoders",
}  # fmt: skip
DEGREES = (1, 2, 4, 8)
# A sum is charged with the least time that was published for one; the median is 2.5 times that. So
# more cores have to be cheaper by more than this.
MARGIN = 0.05


def expected_s(degree: int, barrier: bool = False) -> dict[str, float]:
    """Expected time of a call for one request and of one for eight, together, of each part.

    At the low bound, since copies take as long at each degree; barrier: with the longest one.
    """
    plan = plan_of(
        Path(), RELEASED, "torchneuron", tp=degree, max_concurrency=8, batches=(1, 8),
        context_length=2048, talker_context_length=2048, decode_buckets=(2048,),
        patch_buckets=(1024,), audio_windows=(1,), chunk_frames=(4,),
    )  # fmt: skip
    models = static_models(RELEASED)
    groups = {part: CountingGroup(degree) for part in NAMES}
    for part, group in groups.items():
        parallelize(getattr(models, part), degree, group)
    seconds = dict.fromkeys(NAMES.values(), 0.0)
    for graph in all_graphs(RELEASED, plan):
        if graph.part in ("thinker", "talker") and not graph.name.endswith("_decode"):
            continue
        if graph.part in NAMES:
            cost = graph_cost(graph, getattr(models, graph.part), groups[graph.part])
            seconds[NAMES[graph.part]] += cost.expected_s("low", degree)
            seconds[NAMES[graph.part]] += UNPUBLISHED["high"].barrier_s if barrier else 0
    return seconds


@pytest.mark.release
def test_the_default_degrees_are_the_cheapest_by_the_cost_model() -> None:
    """They are the fewest cores whose expected time is near the least; and the page says so.

    One and two chips differ in how many cores a part may have. What two chips wait for one another
    at each call is not published: the page has both ranks of a part that it decides.
    """
    by_degree = {degree: expected_s(degree) for degree in DEGREES}
    waiting = expected_s(8, barrier=True)
    expected = {part: {d: by_degree[d][part] for d in DEGREES} for part in by_degree[1]}
    for instance, most in (("trn2.48xlarge", 8), ("trn2u.48xlarge", 8), ("trn2.3xlarge", 4)):
        for part, chosen in asdict(TORCHNEURON.limits.tp[instance]).items():
            times = {degree: s for degree, s in expected[part].items() if degree <= most}
            near = [d for d, s in times.items() if s <= (1 + MARGIN) * min(times.values())]
            assert chosen == min(near), (instance, part, times)
    rows = [
        [part, *(f"{1e3 * s:.2f}" for s in (*times.values(), waiting[part]))]
        for part, times in expected.items()
    ]
    eight = [
        part
        for part, degree in asdict(TORCHNEURON.limits.tp["trn2.48xlarge"]).items()
        if degree == 8
    ]
    assert [p for p in eight if waiting[p] > by_degree[4][p]] == ["talker", "encoders"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in PAGE, f"docs/benchmarks/trn2.md should have\n{table}"
