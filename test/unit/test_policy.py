"""Scheduling policy: first samples before text, listeners before prompts, prefill ahead last."""

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.runtime.buffers import Output, TokenBuffer
from qwen3_omni_neuron.runtime.policy import MARGIN, SHORT_FRAMES, TOGETHER_S, SchedulingPolicy
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from testing.prompts import prompt_of
from testing.replaying.cases import OURS, PROFILES, case
from testing.replaying.load import make_load
from testing.replaying.profiles import StageProfile
from testing.simulation import GREEDY, Codec, Simulation, finish
from testing.timed_engines import Sizes, Times

Simulate = Callable[..., Simulation]
TOKENS = [5, 0, 17, 17, 30, 8, 91]
FRAME_S = 0.08
PREFILL_S, ROWS = 0.4, 100


@pytest.fixture(scope="module")
def port() -> StageProfile:
    return StageProfile.load(PROFILES / "port-167.json")


def test_the_first_sample_is_as_early_on_shared_cores_as_on_cores_of_its_own(port) -> None:
    """711 ms once the pace is known; 739 where it is not, and 747 to 785 where text runs ahead."""
    load = [replace(one, frames=16) for one in make_load(12, seed=0)]
    shared = case(port, OURS, "shared", 1, load)
    assert shared["ttfb_mean_s"] < 0.720
    assert shared["ttfb_p50_s"] == pytest.approx(0.668 + 0.027 + 0.009 + 0.003 + 0.119 / 30)
    assert shared["underruns"] == 0, "the second chunk, too, comes in time"
    without = case(port, replace(OURS, knows_cores=False), "shared", 1, load)
    assert without["ttfb_mean_s"] > 0.745


@pytest.mark.parametrize(
    ("first", "second", "frame_s", "steps"),
    [(1, 1, 0.03, [0, 2]), (2, 2, 0.03, [1, 4]), (1, 16, 0.001, [0, 81])],
)
def test_the_thinker_makes_the_tokens_of_the_first_chunk_and_no_others(
    simulate, first, second, frame_s, steps
) -> None:
    """Until the second chunk it is one token ahead, or many where frames are fast."""
    times = Times(0.1, 0.0001, 0.01, 0.05, frame_s / 2, frame_s / 2, 0.03)
    simulation = simulate(times, shares_cores=True)
    before: list[int] = []

    def on_call(name: str, slots: Any) -> None:
        if name.startswith("vocoder"):
            before.append(len(simulation.called("thinker.step")))

    simulation.on_call = on_call  # type: ignore[method-assign]
    finish(simulation.start(TOKENS * 20, 160, chunk_frames=(first, second, 4)))
    assert before[:2] == steps
    text_s = simulation.called("thinker.step")[-1].at_s
    speech_s = simulation.called("talker.predict")[-1].at_s
    assert text_s < 0.6 * speech_s, "after that the text runs ahead"


def make_live(
    talks: bool = True,
    first_token_timeout_s: float = 1e6,
    rows: int = ROWS,
    owner: str | None = None,
) -> LiveRequest:
    """Make a request that nothing has happened to."""
    prompt = prompt_of(torch.arange(rows))
    options = replace(GREEDY, first_token_timeout_s=first_token_timeout_s, wait_timeout_s=1e6)
    options = replace(options, owner=owner)
    condition = threading.Condition()
    condition.acquire()  # as a stage does
    text = TokenBuffer(condition, lambda: None, 1, 2)
    output = Output(condition, lambda: None, lambda: None)
    request = Request(prompt, options, talks, 0.0, Codec())
    return LiveRequest(request, text, output, lambda: None, lambda: 0.0)


def listener(buffered_s: float, frame_s: float = 0.03, tokens: int = 20) -> LiveRequest:
    """Make a listener at time 0 whose 20 frames were all decoded."""
    live = make_live()
    live.timestamps.first_token_s = live.timestamps.first_sample_s = -1.0
    live.token_ids, live.codes = [0] * tokens, [torch.zeros(16)] * 20
    live.text.written = tokens
    live.decoded_frames, live.chunks, live.chunk_wanted = 20, 2, 3
    live.playback.until_s = buffered_s
    live.frame_times.extend(-frame_s * n for n in range(9, 0, -1))
    return live


def starter() -> LiveRequest:
    live = make_live()
    live.timestamps.first_token_s, live.token_ids, live.text.written = -1.0, [0], 1
    return live


def policy(shares_cores: bool, *running: LiveRequest) -> SchedulingPolicy:
    made = SchedulingPolicy(shares_cores, FRAME_S, running)
    made.prefilled(make_live(), ROWS, PREFILL_S, 0.0)
    made.step_s = 0.01
    return made


ENOUGH_S = MARGIN * (PREFILL_S + 0.03)
GAIN = FRAME_S / 0.03 - 1  # seconds of audio in a second


def test_a_prompt_waits_on_shared_cores_for_whom_can_be_served_first() -> None:
    for running, waits in (
        ([], False),
        ([listener(ENOUGH_S + 0.01)], False),
        ([listener(ENOUGH_S - 0.01)], True),
        ([listener(ENOUGH_S - 0.99 * PREFILL_S * GAIN)], True),
        ([listener(0.0, frame_s=0.045)], False),  # never in time
        ([listener(0.3, frame_s=0.09)], False),  # never at all
        ([starter()], True),
        ([listener(0.0, frame_s=0.09), listener(0.5)], True),  # one of them can be served
        ([make_live()], False),  # a prompt itself
        ([make_live(talks=False)], False),
    ):
        rules = policy(True, *running)
        assert (rules.prefill_delay_s(make_live(), ROWS, 0.0, 0.0) > 0) == waits


def test_a_prompt_waits_for_tokens_where_the_thinker_has_its_own_cores() -> None:
    for live, waits in (
        (listener(0.1, tokens=20), True),
        (listener(0.1, tokens=27), True),  # 0.1 + (7 - 2) * 0.08 are less than 1.25 * 0.41
        (listener(0.1, tokens=28), False),
        (listener(0.1, frame_s=0.2, tokens=20), True),  # tokens are what it lacks, not frames
        (starter(), True),
    ):
        rules = policy(False, live)
        assert (rules.prefill_delay_s(make_live(), ROWS, 0.0, 0.0) > 0) == waits
        live.text.close()
        assert rules.prefill_delay_s(make_live(), ROWS, 0.0, 0.0) == 0, "all of its text is there"


@pytest.mark.parametrize(
    ("prefill_s", "together", "in_talker"), [(0.0045, 4, 5), (0.009, 2, 2), (0.5, 1, 1)]
)
def test_short_prompts_are_computed_without_a_step_between(
    simulate, prefill_s, together, in_talker
) -> None:
    """The talker completes one more, that of a request which it has just prepared."""
    times = Times(lambda rows: prefill_s * rows / 8, 0.05, 0.05, 0.001, 0.001, 0.001, 0.001)
    simulation = simulate(times, sizes=Sizes(slots=6), shares_cores=True)
    writing = simulation.start(TOKENS * 8, speak=False)
    simulation.clock.sleep(7 * prefill_s + 0.001)  # prefills are measured, and text is written
    streams = [simulation.start([0, *TOKENS], 40)]
    simulation.clock.sleep(0.001)  # thinker and talker are at this one when the others come
    streams += [simulation.start([n, *TOKENS], 40) for n in range(1, 5)]
    for number, stream in enumerate(streams):
        simulation.assert_right(finish(stream), [number, *TOKENS], 40)
    writing.close()
    for stage, most in {"thinker": together, "talker": in_talker}.items():
        calls = [call.name for call in simulation.calls if call.name.startswith(stage)]
        own = [name for name in calls if "predict" not in name]  # a frame follows its prefill
        runs = [len(list(run)) for name, run in itertools.groupby(own) if "prefill" in name]
        assert max(runs) == most, stage


def prefilling(since_s: float) -> LiveRequest:
    """Make a request at time 0 whose prefill began then."""
    live = make_live()
    live.called_s["thinker"] = since_s
    return live


LASTS = listener(1.0, frame_s=0.005)
LASTS_S = 1.0 - 0.005 * (SHORT_FRAMES + 3 * MARGIN)  # its next chunk has three frames


def test_a_listener_whose_audio_lasts_waits_for_a_starter() -> None:
    for other, held_s in (
        (None, None),
        (starter(), LASTS_S),
        (make_live(), None),  # its prompt will take long
        (make_live(rows=4), LASTS_S),  # its prompt will take 16 ms
        (make_live(rows=6), None),
        (prefilling(0.021 - PREFILL_S), None),
        (prefilling(0.019 - PREFILL_S), LASTS_S),
        (prefilling(-2 * PREFILL_S), LASTS_S),  # it takes longer than expected
        (listener(0.0), None),
    ):
        running = [LASTS] + ([other] if other else [])
        held = policy(True, *running).delayed_speech_s(running, 0.0)
        assert held == ({} if held_s is None else {LASTS: pytest.approx(held_s)})
        assert policy(False, *running).delayed_speech_s(running, 0.0) == {}, "cores of its own"


def test_talker_and_vocoder_are_the_starters_alone(simulate) -> None:
    """From shortly before its prefill ends to its first chunk; the listeners go on after it."""
    times = Times(0.05, 0.001, 0.001, 0.01, 0.009, 0.009, 0.03)
    simulation = simulate(times, shares_cores=True)
    listening = [simulation.start([n, *TOKENS * 40], 250, chunk_frames=(1, 8)) for n in range(2)]
    simulation.clock.sleep(2.0)
    for number in range(8):
        simulation.clock.sleep(0.041 + 0.007 * number)
        assert all(stream._live.playback.left_s > 0.5 for stream in listening)
        before = len(simulation.calls)
        starting = simulation.start(TOKENS, 8, chunk_frames=(1, 8))
        slot = starting.slot
        next(event for event in starting if hasattr(event, "samples"))
        calls = simulation.calls[before:]
        prefill = next(call for call in calls if call.name == "thinker.prefill")
        chunk = next(call for call in calls if "vocoder" in call.name and slot in call.slots)
        free_s = prefill.at_s + 0.05 - TOGETHER_S + 0.009  # a frame has two calls
        beside = [
            call for call in calls if free_s < call.at_s < chunk.at_s and "thinker" not in call.name
        ]
        assert {call.slots for call in beside} == {(slot,)}, beside
        assert chunk.slots == (slot,)
        simulation.assert_right(finish(starting), TOKENS, 8)
    for number, stream in enumerate(listening):
        simulation.assert_right(finish(stream), [number, *TOKENS * 40], 250)


def test_a_piece_is_prefilled_where_nobody_waits() -> None:
    for live, may in (
        (None, True),
        (make_live(), False),  # waits for its first token
        (make_live(talks=False), False),
        (starter(), False),
        (listener(ENOUGH_S + 0.01), True),
        (listener(ENOUGH_S - 0.01), False),
        (listener(math.inf), True),
    ):
        running = [listener(10.0)] + ([live] if live else [])
        assert policy(True, *running).is_pause(ROWS) == may


def test_a_request_waits_for_one_prefill_of_another_owner_and_not_for_all(simulate) -> None:
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=4), frames=3)
    many = [simulation.start([n, *TOKENS], owner="a") for n in range(3)]
    mine = simulation.start([9, 9], owner="b")
    assert mine.queue_position == 0
    result = finish(mine)
    simulation.assert_right(result, [9, 9], 3)
    assert result.timings.ttft_s <= 2.1, "the prefill that runs, and its own"
    for number, stream in enumerate(many):
        simulation.assert_right(finish(stream), [number, *TOKENS], 3)
    simulation.assert_idle()


def test_a_short_prompt_comes_between_two_chunks_of_another_owners_long_one(simulate) -> None:
    simulation = simulate(Times(lambda rows: rows * 1e-3, 0.01), Sizes(slots=4), frames=3)
    other = simulation.start([7] * 900, owner="c", speak=False)
    next(iter(other))
    long = simulation.start([8] * 3000, owner="a", speak=False)
    mine = finish(simulation.start([9] * 200, owner="b", speak=False, thinker_limit=1))
    assert mine.timings.ttft_s < 0.6, "its own two chunks, and three of the other's at most"
    assert finish(long).timings.ttft_s > 3
    finish(other)
    simulation.assert_idle()


def test_an_owners_prefill_takes_half_of_the_time_of_another_ones_text() -> None:
    mine, other = make_live(owner="a"), make_live(talks=False, owner="b")
    other.timestamps.first_token_s = -1.0
    for running, ended_s, alone, rows in (
        ([mine], None, True, 4000),
        ([mine], None, False, 1000),
        ([mine, other], None, True, 250),
        ([mine], 4.5, True, 250),
        ([mine], 3.5, True, 4000),
    ):
        rules = SchedulingPolicy(True, FRAME_S, running)
        rules.prefilled(mine, 1000, 0.1, 5.0)
        if ended_s is not None:
            rules.ended(other, ended_s)
        assert rules.chunk_rows(mine, 4000, alone, 5.0) == rows
        held_s = [rules.prefill_delay_s(live, 10, math.inf, 5.04) for live in (mine, other)]
        assert held_s == pytest.approx([0.06 * (other in running), 0.0])
        assert not rules.prefill_delay_s(mine, 10, -math.inf, 5.1)


def test_a_request_of_an_owner_without_a_slot_is_the_next_to_get_one(simulate) -> None:
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=1), frames=3)
    many = [simulation.start([n], owner="a") for n in range(4)]
    assert finish(simulation.start([9], owner="b")).timings.queued_s <= 1.1
    results = [finish(stream) for stream in many]
    assert [round(result.timings.queued_s) for result in results] == [0, 2, 3, 4]
