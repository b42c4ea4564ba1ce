"""The replay: profiles, core groups, listeners, and what it says of the port's way and of ours."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench import replay as replay_module
from bench.replay import PUBLISHED_TTFB_S
from bench.roofline_profile import PROFILES_MADE, TP, WINDOW
from bench.trn2.cost import CountingGroup, graph_cost
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED
from testing.replaying.cases import OURS, PORT, PROFILES, case
from testing.replaying.device import PLACEMENTS, Span
from testing.replaying.load import make_load
from testing.replaying.profiles import (
    ProfileError,
    StageLatency,
    StageProfile,
    measured_profile,
)
from testing.replaying.simulation import replay, replay_after_speech
from testing.results import load_results

LOAD = make_load(20, seed=0)
FEW = make_load(4, seed=0)


@pytest.fixture(scope="module")
def port() -> StageProfile:
    return StageProfile.load(PROFILES / "port-167.json")


def overlap(spans: list[Span]) -> list[tuple[str, str]]:
    """Calls that had cores at the same time."""
    spans = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    return [
        (a.call, b.call)
        for a, b in pairwise(spans)
        if b.start_s < a.end_s - 1e-9 and b.end_s > b.start_s
    ]


def called(spans: list[Span], call: str) -> list[Span]:
    return [span for span in spans if span.call == call]


# The port


def test_driven_the_ports_way_it_is_as_slow_as_the_port_was(port: StageProfile) -> None:
    """668 to the first token, 4 x 10.2 to the fifth, 60 of thread, 27 of prefill, 25 frames of 14
    on the cores and 11 beside them but for one step of 5, 122 of code2wav: 1538 ms. The rest is the
    thinker, which has the same cores. None of these figures is taken from the 1759."""
    alone = replay(port, PORT, "split", 1, FEW).replies
    alone_s = 0.668 + 4 * 0.0102 + 0.06 + 0.027 + 25 * 0.025 - 0.005 + 0.122
    for reply in alone:
        assert reply.result.timings.ttfb_s == pytest.approx(alone_s)
    shared = case(port, PORT, "shared", 1, LOAD)
    assert shared["ttfb_mean_s"] == pytest.approx(PUBLISHED_TTFB_S, rel=0.1)
    assert shared["ttft_mean_s"] == pytest.approx(0.668)
    assert shared["underruns"] == 0


# Ours


@pytest.mark.parametrize(("placement", "goal_s"), [("shared", 0.76), ("split", 0.76)])
def test_ours_is_below_its_goal_at_the_ports_latencies(
    port: StageProfile, placement: str, goal_s: float
) -> None:
    """Every request, the first one too, which knows no pace; and no player runs dry."""
    replies = replay(port, OURS, placement, 1, LOAD).replies
    assert len(replies) == len(LOAD)
    assert max(one.result.timings.ttfb_s or 9.0 for one in replies) < goal_s
    assert sum(one.underruns for one in replies) == 0


def test_the_same_replay_twice_says_the_same(port: StageProfile) -> None:
    first, second = (replay(port, OURS, "shared", 3, make_load(6, seed=1)) for _ in range(2))
    assert first.spans == second.spans
    assert [one.chunks for one in first.replies] == [one.chunks for one in second.replies]
    assert case(port, OURS, "shared", 2, FEW) == case(port, OURS, "shared", 2, FEW)


# Prompts that grow


def test_rows_behind_others_cost_what_their_number_says(port: StageProfile) -> None:
    """One length was published, 1,294 rows on average; a step is the least that a call costs."""
    assert port.prefill_by_rows_s(1294) == port.prefill_by_rows_s(2000) == pytest.approx(0.668)
    assert port.prefill_by_rows_s(111) == pytest.approx(0.668 * 111 / 1294)
    assert port.prefill_by_rows_s(1) == pytest.approx(0.0102)
    expected = StageProfile.load(PROFILES / "expected.json")
    assert expected.prefill_by_rows_s(111) == expected.seconds("thinker_prefill", 111)


def test_only_rows_that_are_not_held_are_prefilled(port: StageProfile) -> None:
    """The thinker's share of its time, the talker's prefill, one or two frames, the vocoder."""
    load = [replace(FEW[0], prompt_rows=1294, talker_rows=494)] * 3
    found = replay_after_speech(port, replace(OURS, chunked_prefill=True), "split", load, 1200, 0)
    expected_s = 0.668 * 94 / 1294 + 0.027 + 0.009 + 0.003 + 0.119 / 30
    assert expected_s - 1e-6 < found[1] < expected_s + 0.02
    cold = replay_after_speech(port, replace(OURS, chunked_prefill=True), "split", load, 0, 0)
    assert cold[0] - found[0] == pytest.approx(0.668 * 1200 / 1294)


# Cores


# Players


# Profiles


@pytest.mark.parametrize(
    ("rule", "table", "size", "seconds"),
    [
        ("bucket", {2: 0.2, 8: 0.4}, 2, 0.2),
        ("bucket", {2: 0.2, 8: 0.4}, 3, 0.4),
        ("line", {2: 0.2, 8: 0.8}, 5, 0.5),
        ("line", {2: 0.2, 8: 0.8}, 1, 0.1),
        ("line", {2: 0.2, 8: 0.8}, 10, 1.0),
        ("line", {0: 0.1, 4: 0.2, 8: 0.8}, 10, 1.1),
        ("line", {4: 0.0, 8: 1.0}, 1, 0.0),  # never before it began
        ("line", {7: 0.3}, 100, 0.3),
    ],
)
def test_the_latency_of_a_call_follows_its_size_by_the_stages_rule(
    rule: str, table: dict[int, float], size: int, seconds: float
) -> None:
    latency = StageLatency("talker_step", rule, tuple(table.items()), "made up")
    assert latency.of(size) == pytest.approx(seconds)


def test_a_call_larger_than_every_bucket_ends_the_replay(port: StageProfile) -> None:
    message = r"stage thinker_prefill: a call of size 3000 .* the largest bucket is 2048"
    with pytest.raises(ProfileError, match=message):
        replay(port, OURS, "shared", 1, [replace(FEW[0], prompt_rows=3000)])


def test_a_profile_is_read_as_it_was_written(port: StageProfile, tmp_path: Path) -> None:
    port.save(tmp_path / "p.json")
    assert StageProfile.load(tmp_path / "p.json") == port
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "none.json"):
        with pytest.raises(ProfileError, match=name):
            StageProfile.load(tmp_path / name)


def test_profiles_have_the_times_of_the_cost_model() -> None:
    """Two graphs that are counted quickly: a step of the talker, and a frame of code2wav."""
    models, group = static_models(RELEASED), CountingGroup(TP)
    kept = replace(
        TINY_PLAN, dtype="bfloat16", tp=Degrees.same(TP), max_concurrency=8, context_length=8192,
        talker_context_length=8192, decode_buckets=(WINDOW,), batches=(1,), chunk_frames=(1,),
    )  # fmt: skip
    graphs = {graph.name: graph for graph in reversed(list(all_graphs(RELEASED, kept)))}
    written = {name: StageProfile.load(PROFILES / f"{name}.json") for name in PROFILES_MADE}
    for stage, name in (("talker_step", "talker_decode"), ("code2wav_step", "code2wav")):
        graph = graphs[name]
        owner = getattr(models, graph.part)
        parallelize(owner, TP, group)
        cost = graph_cost(graph, owner, group)
        floor = cost.floor_s()
        assert written["roofline"].seconds(stage, 1) == pytest.approx(floor, rel=1e-6)
        expected = cost.expected_s()
        assert written["expected"].seconds(stage, 1) == pytest.approx(expected, rel=1e-6)


# The command


def test_every_line_is_labelled_a_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--requests", "4", "--first-chunk", "adaptive,8", "--concurrency", "1,2"]
    replay_module.main([*arguments, "--driver", "--json", str(out)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert all("replay" in line for line in lines if not line.startswith("| ---"))
    results = load_results(out)
    assert results.benchmark == "replay"
    assert results.settings["concurrency"] == [1, 2]
    assert {row["kind"] for row in results.rows} == {"replay"}
    assert len(results.rows) == len(PLACEMENTS) * (1 + 2 * 2)
    assert len(lines) == 2 + len(results.rows) + 1 + len(results.headlines)
    assert "the port measured 1759" in lines[-4]


# A profile of what was measured


def test_a_profile_of_measured_stages() -> None:
    def row(stage: str, seconds: float, **size: int) -> dict[str, object]:
        return {"stage": stage, "median_s": seconds, **size}

    rows = [
        row("audio encoder", 0.1, frames=100),
        row("audio encoder", 0.3, frames=1601),
        row("thinker prefill", 0.2, rows=128),
        row("thinker decode", 0.01, batch=1, rows=128),
        row("thinker decode", 0.02, batch=1, rows=512),
        row("talker prepare", 0.03, rows=100),
        row("talker prefill", 0.01, rows=100),
        row("talker step", 0.005, batch=4),
        row("code predictor", 0.009, batch=1),
        row("code2wav start", 0.04, batch=1, frames=2),
        row("code2wav step", 0.05, batch=4, frames=25),
    ]
    profile = measured_profile(rows, "mine", "a test")
    assert dict(profile.stages["encoders"].seconds) == {1: 0.1, 3: 0.3}
    assert profile.seconds("thinker_decode", 1) == 0.02
    assert profile.seconds("talker_prefill", 90) == pytest.approx(0.04)
    assert dict(profile.stages["code2wav_step"].seconds) == {100: 0.05}
    assert profile.seconds("driver_frame", 3) == 0
    with pytest.raises(ValueError, match="no row of code2wav step: a profile needs a model"):
        measured_profile(rows[:-1], "mine", "a test")
    with pytest.raises(ValueError, match=r"differ in rows \[100, 128\]"):
        measured_profile(
            [r | {"rows": 128} if r["stage"] == "talker prepare" else r for r in rows], "", ""
        )
