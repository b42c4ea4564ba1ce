"""The replay: profiles, core groups, listeners, and what it says of the port's way and of ours."""

from dataclasses import replace

import pytest

from bench import replay as replay_module
from bench.replay import PUBLISHED_TTFB_S
from testing.replaying.cases import OURS, PORT, PROFILES, case
from testing.replaying.device import PLACEMENTS
from testing.replaying.load import make_load
from testing.replaying.profiles import StageProfile, measured_profile
from testing.replaying.simulation import replay
from testing.results import load_results

LOAD = make_load(20, seed=0)
FEW = make_load(4, seed=0)


@pytest.fixture(scope="module")
def port() -> StageProfile:
    return StageProfile.load(PROFILES / "port-167.json")


def test_driven_the_ports_way_it_is_as_slow_as_the_port_was(port) -> None:
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


def test_a_step_takes_less_in_the_code_predictors_call(port) -> None:
    joined = replace(port, saved_s=0.002)
    for behaviour, saved_s in ((OURS, 0.002), (PORT, 0.0)):
        apart, one = (case(p, behaviour, "split", 1, FEW)["rtf_mean"] for p in (port, joined))
        assert apart - one == pytest.approx(saved_s / 0.08, rel=0.05)


def test_every_line_is_labelled_a_replay(capsys, tmp_path) -> None:
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
