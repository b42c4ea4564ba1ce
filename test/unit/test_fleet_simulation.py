"""The simulated fleet: its curves, its queues, affinity, and replicas that come and go."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from bench.fleet import day_rate, figures, most_at_once, replies_per_s, tables
from qwen3_omni_neuron.serving.fleet.scaling import FirstAudioPolicy
from testing.command_line import InputError
from testing.replaying.cases import PROFILES
from testing.replaying.curves import FRAME_S, RANKS, ServiceCurves, replayed_curves
from testing.replaying.fleet import Fleet, Outcome, Plan, Talk
from testing.replaying.load import SYSTEM_ROWS, RequestLengths, make_load
from testing.replaying.profiles import StageLatency, StageProfile

AUDIO_S, FRAMES, TOKENS = 4.0, 100, 60
LENGTHS = [RequestLengths(0, 0, AUDIO_S, TOKENS, FRAMES)]
TALK = Talk(LENGTHS, turns=4.0, think_s=5.0)


class HashRing:
    """Ring of highest hashes: as stable as Ray's, without Ray."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def update(self, names: Iterable[str]) -> None:
        self.names = sorted(names)

    def rank(self, key: str) -> Sequence[str]:
        return sorted(self.names, key=lambda n: hashlib.md5((key + n).encode()).digest())[:3]


def curves_of(first_s: float = 0.5, frame_s: float = 0.02, gain: float = 1.0) -> ServiceCurves:
    """A replica whose requests take so long alone, and longer beside others by `gain`.

    A row to prefill takes a millisecond.
    """
    at_once = (1, 2, 4, 8)
    slower = np.array([count ** (1 - math.log(gain, 8)) for count in at_once])
    first = (np.array([[[0.0]], [[1.0]]]) + first_s) * slower[None, :, None] * np.ones(len(RANKS))
    frame = np.ones((2, 1)) * frame_s * slower
    return ServiceCurves((0, 1000), at_once, first, frame, np.array([1.0, 1.0, 1.0, 1.0]))


def run(
    plan: Plan, rate: float, seconds: float = 600.0, curves: ServiceCurves | None = None
) -> Outcome:
    fleet = Fleet(plan, curves or curves_of(), TALK, HashRing(), 0, since_s=100.0)
    return fleet.day(lambda _: rate, rate, seconds)


# Curves


def test_curves_are_the_replays_at_their_points_and_lines_between() -> None:
    curves = curves_of()
    assert curves.frame_of(0, 4) == pytest.approx(0.08)
    assert curves.frame_of(500, 3) == pytest.approx(0.06)
    assert curves.first_audio_of(500, 2)[5] == pytest.approx(2 * 1.0)
    assert curves.first_audio_of(2000, 1)[0] == pytest.approx(2.5)  # as the last step does
    assert curves.frame_of(-5, 1) == curves.frame_of(0, 1)
    assert curves.cores_of(3) == 1.0


def test_a_replayed_replica_is_slower_with_more_requests_and_with_more_rows() -> None:
    port = StageProfile.load(PROFILES / "port-167.json")
    curves = replayed_curves(port, "split", 2, make_load(3, 0))
    assert curves.at_once == (1, 2) and curves.rows == (64, 323, 1294)
    # 668 ms of prefill, 27 of the talker's, a frame of 14, code2wav: as bench.replay has it.
    assert curves.first_audio_of(1294, 1)[0] == pytest.approx(0.71, abs=0.01)
    assert (np.diff(curves.first_audio_s.mean(axis=2), axis=0) > 0).all()
    assert (np.diff(curves.frame_s, axis=1) > 0).all()
    assert curves.frame_of(64, 1) == pytest.approx(0.0143, rel=0.01)


def test_a_replay_ends_where_speech_cannot_keep_up() -> None:
    port = StageProfile.load(PROFILES / "port-167.json")
    slow = StageLatency("code_predictor", "line", ((0, 0.1),), "longer than a frame")
    port = StageProfile("slow", "made", {**port.stages, "code_predictor": slow})
    curves = replayed_curves(port, "split", 8, make_load(1, 0))
    assert curves.at_once == (1,) and curves.frame_of(64, 1) > FRAME_S
    with pytest.raises(InputError, match="slower than playback"):
        most_at_once(curves, 8)
    assert most_at_once(curves_of(), 8) == 3  # 20, 40, 60 and 80 ms a frame, of 72


# Queues


def test_one_client_of_one_replica_waits_for_itself_alone() -> None:
    outcome = Fleet(Plan(8), curves_of(), TALK, HashRing()).closed(1, 1000.0)
    reply_s = outcome.quantile_s(0.5) + 0.02 * FRAMES
    assert len(outcome.first_audio_s) == pytest.approx(1000 / reply_s, abs=2)
    assert outcome.waited == outcome.refused == 0


@pytest.mark.parametrize(("gain", "times"), [(1.0, 1.0), (8.0, 8.0)])
def test_eight_at_once_answer_as_many_times_more_as_their_curves_say(
    gain: float, times: float
) -> None:
    done = [
        len(Fleet(Plan(8), curves_of(gain=gain), TALK, HashRing()).closed(k, 2000.0).first_audio_s)
        for k in (1, 8)
    ]
    assert done[1] / done[0] == pytest.approx(times, rel=0.02)


def test_replicas_that_share_one_core_are_no_faster_than_one() -> None:
    def done(replicas: int, cores: float) -> int:
        plan = Plan(8, replicas=replicas, cores=cores)
        fleet = Fleet(plan, curves_of(gain=8.0), TALK, HashRing())
        return len(fleet.closed(24, 300.0).first_audio_s)

    assert done(3, cores=3.0) == pytest.approx(done(3, cores=0.0), rel=0.01)
    assert done(3, cores=1.0) == pytest.approx(done(3, cores=3.0) / 3, rel=0.1)


def test_a_full_replica_lets_requests_wait_or_refuses_them() -> None:
    waiting = run(Plan(1), rate=0.05)
    assert waiting.waited and not waiting.refused and max(waiting.first_audio_s) > 2.58
    queued = Fleet(Plan(1, queued=2), curves_of(), TALK, HashRing()).closed(3, 500.0)
    assert not queued.waited  # in the replica, in turn: two replies of others first
    assert queued.quantile_s(0.5) == pytest.approx(2 * 2.58 + 0.58, abs=0.01)
    refusing = run(Plan(1, patience_s=5.0), rate=5.0)
    assert refusing.refused > 100 and max(refusing.first_audio_s) < 5 + 3.0


def test_the_same_seed_gives_the_same_day() -> None:
    plan = Plan(4, replicas=3)
    assert figures(run(plan, 0.2), "split") == figures(run(plan, 0.2), "split")


# Affinity


def test_a_conversation_finds_its_rows_with_affinity_and_the_system_prompt_without() -> None:
    plan = Plan(8, slots=64, replicas=4)
    found, lost = run(plan, 0.05), run(Plan(8, slots=64, replicas=4, affinity=False), 0.05)
    assert found.held / found.rows == pytest.approx(1 - found.fresh / found.rows, abs=0.01)
    system = SYSTEM_ROWS * len(lost.first_audio_s) / lost.rows
    assert system < lost.held / lost.rows < found.held / found.rows - 0.05
    assert lost.quantile_s(0.5) > found.quantile_s(0.5)


def test_few_slots_forget_conversations() -> None:
    few, many = (run(Plan(8, slots=slots, replicas=1), 0.05) for slots in (1, 64))
    assert few.held / few.rows < many.held / many.rows - 0.05


# Replicas that come and go


def test_a_fleet_grows_for_a_load_and_shrinks_after_it() -> None:
    sizes: list[int] = []

    def settle(wanted: int, target: int, now: float) -> int:
        sizes.append(wanted)
        return wanted

    policy = FirstAudioPolicy(target_s=3.0, spare=1)
    plan = Plan(4, replicas=2, policy=policy, most=50, settle=settle, load_s=60.0)
    fleet = Fleet(plan, curves_of(), TALK, HashRing(), 0)
    most = 2.0
    busy = fleet.day(lambda t: most if 1000 < t < 3000 else 0.05, most, 5000.0)
    # Each reply is 100 frames of 20 ms and half a second, four times that with four at once.
    needed = most * TALK.turns * 2.6
    assert needed < max(sizes) < 2 * needed
    assert sizes[-1] <= 4 and busy.most_replicas == max(sizes)
    assert max(sizes) - 2 <= busy.loads < 2 * max(sizes), "it goes up and down"
    assert 60.0 * busy.loads < busy.replica_s < 5000 * max(sizes)


def test_no_reply_is_lost_when_replicas_go() -> None:
    targets = iter([6, 1, 6, 1, 3] + [3] * 1000)
    plan = Plan(
        4,
        replicas=3,
        policy=FirstAudioPolicy(),
        most=9,
        settle=lambda wanted, target, now: next(targets),
        load_s=20.0,
    )
    fleet = Fleet(plan, curves_of(), TALK, HashRing(), 0)
    changing = fleet.closed(12, 2000.0)
    assert changing.refused == 0 and changing.loads == 3 + 5 + 2
    assert changing.replica_s < 6 * 2000


# The day and the tables


def test_a_day_has_its_hours() -> None:
    rate = day_rate(1.0, seed=0)
    quiet, busy = (min(rate(h * 3600 + m) for m in range(0, 3600, 300)) for h in (3, 15))
    assert quiet == pytest.approx(0.2, abs=0.02) and busy == pytest.approx(1.0, abs=0.02)
    assert max(rate(t) for t in range(0, 86400, 60)) > 1.0


def test_tables_say_that_they_are_simulated() -> None:
    outcome = run(Plan(4, replicas=2), 0.2)
    case = {"profile": "p", "placement": "split", "at_once": 4, "replicas": 2, "affinity": True}
    row: dict[str, Any] = {"kind": "busy hour", **case, **figures(outcome, "split")}
    lines = tables([row, {**row, "kind": "day"}], price=None)
    assert [line for line in lines if line][::3] == [
        line for line in lines if line.startswith("| simulated")
    ]
    heads = [line.count("|") for line in lines if line]
    assert heads[0] == heads[1] == heads[2] and heads[3] == heads[4] == heads[5]
    hours = 1e6 / (outcome.speech_s / 60) * outcome.replica_s / 3600 / 2
    assert f"| {hours:,.0f} |" in lines[2]
    assert f"| {3 * hours:,.0f} |" in tables([row], price=3.0)[2]
    assert replies_per_s(curves_of(), 4, TALK) == pytest.approx(4 / (4 * (0.5 + 0.32 + 2)))
