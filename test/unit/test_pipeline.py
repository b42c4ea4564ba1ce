"""The runtime over engines that only take time: what is said, and when."""

import random
from collections.abc import Callable

import pytest
import torch

from qwen3_omni_neuron.errors import BusyError
from qwen3_omni_neuron.events import AudioChunk, TextDelta
from qwen3_omni_neuron.runtime.schedule import AdaptiveSchedule, Pace
from testing.replaying.simulation import take_reply
from testing.simulation import EOS, Simulation, finish
from testing.timed_engines import Sizes, TimedTalker, Times

Simulate = Callable[..., Simulation]

TOKENS = [5, 0, 17, 17, 30, 8, 91]


def stutter(number: int) -> float:
    return random.Random(number).choice((0.0, 0.001, 0.02, 0.3))


def stall_at(step: int) -> Callable[[int], float]:
    return lambda number: 3.0 if number == step else 0.01


TIMINGS = {
    "all at once": Times(),
    "thinker slower": Times(0.1, 0.2, 0.01, 0.05, 0.008, 0.01, 0.02),
    "thinker faster": Times(0.1, 0.001, 0.3, 0.05, 0.05, 0.04, 0.02),
    "talker's prompt slower than the whole text": Times(0.01, 0.001, 1.0, 1.0, 0.01, 0.01, 0.02),
    "vocoder slowest": Times(0.1, 0.02, 0.01, 0.05, 0.008, 0.01, 0.5),
    "thinker stutters": Times(0.1, stutter, 0.01, 0.05, 0.008, 0.01, 0.02),
    "talker stutters": Times(0.1, 0.02, 0.01, 0.05, stutter, 0.01, 0.02),
    "both stutter": Times(0.1, stutter, 0.01, 0.05, lambda n: stutter(n + 99), 0.01, 0.02),
    "thinker stalls early": Times(0.1, stall_at(0), 0.01, 0.05, 0.008, 0.01, 0.02),
    "thinker stalls late": Times(0.1, stall_at(5), 0.01, 0.05, 0.008, 0.01, 0.02),
    "talker stalls": Times(0.1, 0.02, 0.01, 0.05, stall_at(3), 0.01, 0.02),
}


@pytest.mark.parametrize("times", TIMINGS.values(), ids=TIMINGS.keys())
@pytest.mark.parametrize("tokens", range(1, 8))
@pytest.mark.parametrize("shares_cores", [False, True], ids=["split", "shared"])
@pytest.mark.diagonal
def test_streaming_says_what_one_stage_after_the_other_says(
    simulate, times, tokens, shares_cores
) -> None:
    """Whenever the text ends, and whichever stage waits for which."""
    simulation = simulate(times, shares_cores=shares_cores)
    for frames in (1, 3, tokens, tokens + 1, 30):
        result = finish(simulation.start(TOKENS[:tokens], frames))
        simulation.assert_right(result, TOKENS[:tokens], frames)
        assert result.talker_finish_reason == "length"
    simulation.assert_idle()


@pytest.mark.parametrize("timing", ["thinker faster", "thinker slower"])
def test_a_frames_call_is_told_the_next_row_once_sound_is_out(
    simulate, monkeypatch, timing
) -> None:
    """The first chunk waits for no step, and no call for a row."""
    simulation, told, predict = simulate(TIMINGS[timing]), [], TimedTalker.predict

    def watched(talker, slots, code0, sampling) -> torch.Tensor:
        told.append((simulation.clock.now(), sampling[0].token_id))
        return predict(talker, slots, code0, sampling)

    monkeypatch.setattr(TimedTalker, "predict", watched)
    result = finish(simulation.start(TOKENS, 12, chunk_frames=(2, 4)))
    simulation.assert_right(result, TOKENS, 12)
    rows = [*TOKENS, simulation.config.tts_eos_id, *[simulation.config.tts_pad_id] * 12]
    for number, (at_s, token_id) in enumerate(told):
        known = timing == "thinker faster" or number >= len(TOKENS)
        sounds = at_s >= result.timings.ttfb_s
        assert token_id == (rows[number + 1] if known and sounds else None)
    assert sum(token_id is not None for _, token_id in told) > 4


def test_speech_that_ends_by_itself_stops_there(simulate) -> None:
    simulation = simulate(frames=11)
    result = finish(simulation.start(TOKENS, 100))
    simulation.assert_right(result, TOKENS, 11)
    assert result.talker_finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 6, 7])
def test_a_text_that_its_limit_cuts_is_spoken_to_its_last_token(simulate, limit) -> None:
    simulation = simulate(TIMINGS["thinker slower"])
    result = finish(simulation.start(TOKENS, 12, thinker_limit=limit))
    assert result.token_ids == TOKENS[:limit]
    assert result.thinker_finish_reason == "length"
    expected = simulation.expected_codes(TOKENS, 12, limit)
    assert result.codes.tolist() == [codes.tolist() for codes in expected]


def test_replies_end_where_the_caches_do(simulate) -> None:
    """The thinker's prompt of 7 leaves 5 positions of 12. The talker's of 7 + 9 rows leaves 4 of
    20, so 5 codec tokens, the last of which gets no frame."""
    text = finish(simulate(sizes=Sizes(context_length=12)).start(TOKENS, speak=False))
    assert text.token_ids == TOKENS[:5]
    assert text.thinker_finish_reason == "length"
    simulation = simulate(sizes=Sizes(context_length=20))
    speech = finish(simulation.start(TOKENS, 100))
    simulation.assert_right(speech, TOKENS, 4)
    assert speech.talker_finish_reason == "length"


def test_a_text_that_nobody_reads_is_bounded(simulate) -> None:
    simulation = simulate(Times(thinker_step_s=0.01))
    tokens = [n % 300 for n in range(3000)]
    stream = simulation.start(tokens, speak=False, thinker_limit=4000)
    simulation.clock.sleep(100.0)
    assert len(stream._live.token_ids) == 1024
    assert finish(stream).token_ids == [*tokens, EOS]


@pytest.mark.parametrize("speak", [False, True])
def test_a_text_with_stop_strings_goes_on_when_its_caller_reads_again(simulate, speak) -> None:
    """The thinker waits for room for many tokens, and goes on when there is room for so many."""
    simulation = simulate(Times(0.1, 0.01, 0.01, 0.05, 0.02, 0.01, 0.01))
    tokens = [number % 300 for number in range(1100)]
    stream = simulation.start(tokens, 40, speak=speak, thinker_limit=5000, stop=("never comes",))
    simulation.clock.sleep(20.0)
    assert len(simulation.called("thinker.step")) < 1024
    begin_s = simulation.clock.now()
    assert finish(stream).token_ids == [*tokens, EOS]
    assert simulation.clock.now() - begin_s < 10


def test_an_empty_reply_is_no_speech(simulate) -> None:
    simulation = simulate()
    result = finish(simulation.start([], 5))
    assert result.token_ids == [EOS]
    assert result.talker_finish_reason == "no_speech"
    assert result.audio.size == 0
    simulation.assert_idle()


def test_text_that_ends_within_a_character_comes_before_the_sound_that_follows(simulate) -> None:
    """An incomplete character is handed out when the text ends."""
    simulation = simulate(Times(talker_step_s=0.05))
    half = simulation.start(TOKENS, 30, decode_text=lambda ids: "\ufffd" * len(ids))
    kinds = [type(event) for event in half]
    assert kinds.count(TextDelta) == 1
    assert kinds.index(TextDelta) < kinds.index(AudioChunk)


@pytest.mark.parametrize(("sizes", "frames"), [((1, 4), 1), ((2,), 2), ((8, 25), 8)])
def test_time_to_first_sample_is_these_calls_and_nothing_else(simulate, sizes, frames) -> None:
    """Thinker prefill, talker prefill, the first frames, one call of the vocoder."""
    times = Times(0.5, 0.01, 0.3, 0.1, 0.02, 0.03, 0.015)
    simulation = simulate(times)
    result = finish(simulation.start(TOKENS, 30, chunk_frames=sizes))
    expected_s = 0.5 + 0.1 + frames * 0.03 + (frames - 1) * 0.02 + 0.015
    assert result.timings.ttft_s == pytest.approx(0.5)
    assert result.timings.ttfb_s == pytest.approx(expected_s)


def test_a_fixed_schedule_is_kept_to(simulate) -> None:
    stream = simulate(Times(talker_step_s=0.05)).start(TOKENS, 30, chunk_frames=(1, 2, 8))
    chunks = [event for event in stream if isinstance(event, AudioChunk)]
    assert [chunk.frames for chunk in chunks] == [1, 2, 8, 8, 8, 3]
    first = [chunk.first_sample for chunk in chunks]
    assert first == [0, *(1920 * n - 555 for n in (1, 3, 11, 19, 27))]


@pytest.mark.parametrize(
    ("pending", "buffered_s", "call_s", "frames"),
    [(0, 0.11, 0.0, 8), (0, 0.09, 0.0, 4), (0, 0.11, 0.02, 4), (2, 0.09, 0.0, 8), (0, 0.0, 0.1, 1)],
)
def test_a_chunk_is_as_large_as_frames_and_vocoder_make_in_time(
    pending, buffered_s, call_s, frames
) -> None:
    """Frames of 10 ms, a quarter more than they take, and the vocoder's own call."""
    schedule = AdaptiveSchedule((1, 2, 4, 8), 0.08, 0.023)
    assert schedule.next_frames(Pace(pending, buffered_s, 0.01, call_s)) == frames


@pytest.mark.parametrize(
    ("frame_s", "vocoder_s", "slow"),
    [(0.1, 0.0, "talker"), (0.02, 0.2, "vocoder"), (0.06, 0.01, None)],
    ids=["talker", "vocoder", "none"],
)
def test_the_stage_that_is_slower_than_speech_is_named(simulate, frame_s, vocoder_s, slow) -> None:
    """The prompt's prefill does not count, however long it takes."""
    simulation = simulate(Times(9.0, 0.005, 0, 0.05, frame_s, 0, vocoder_s))
    result = finish(simulation.start(TOKENS, 60, chunk_frames=(1,)))
    timings = result.timings
    assert timings.slow_stage == slow
    assert timings.speech_s["talker"] == pytest.approx(0.05 + 60 * frame_s, abs=2 * frame_s)
    assert timings.speech_s["vocoder"] == pytest.approx(60 * vocoder_s)
    assert timings.speech_s["thinker"] < 1


def test_a_caller_may_hear_the_first_chunk_early(simulate) -> None:
    """On a machine slower than speech the player stops between chunks; its samples are the same."""
    simulation = simulate(Times(0.1, 0.005, 0, 0.05, 0.1, 0, 0.05))
    finish(simulation.start(TOKENS, 60))
    steady = take_reply(simulation.start(TOKENS, 60), 0.0, simulation.clock)
    early = take_reply(simulation.start(TOKENS, 60, first_chunk="early"), 0.0, simulation.clock)
    assert (early.chunks[0], steady.chunks[0]) == (1, 4)
    assert early.underruns > steady.underruns
    first_s = [reply.result.timings.ttfb_s or 0.0 for reply in (early, steady)]
    assert first_s[0] < first_s[1] - 0.2
    assert (early.result.codes == steady.result.codes).all()


@pytest.mark.parametrize("vocoder_ms", [1, 10, 30, 50])
@pytest.mark.parametrize("frame_ms", [2, 10, 20, 30, 40, 44, 45, 46, 50, 60, 65, 70])
@pytest.mark.diagonal
def test_a_player_never_runs_dry_while_frames_come_in_time(simulate, frame_ms, vocoder_ms) -> None:
    """The first request does not know the pace; the second one does, and may start earlier."""
    times = Times(0.1, 0.005, 0, 0.05, frame_ms / 2000, frame_ms / 2000, vocoder_ms / 1000)
    simulation = simulate(times)
    for _ in range(2):
        reply = take_reply(simulation.start(TOKENS, 150), 0.0, simulation.clock)
        assert reply.underruns == 0, f"{1000 * reply.silent_s:.0f} ms in all"
        assert len(reply.result.codes) == 150


def test_the_first_chunk_is_one_frame_where_the_pace_is_known_to_be_fast(simulate) -> None:
    simulation = simulate(Times(0.1, 0.005, 0, 0.05, 0.01, 0.01, 0.005))
    chunks = [
        [event.frames for event in simulation.start(TOKENS, 120) if isinstance(event, AudioChunk)]
        for _ in range(2)
    ]
    assert chunks[0][0] == 2
    assert chunks[1][0] == 1
    assert max(chunks[1]) == 25, "and they grow"
    assert sum(chunks[1]) == 120


def test_a_talker_that_waits_for_text_does_not_move(simulate) -> None:
    """No step, no code predictor, no frame while the thinker stalls; then on from there."""
    simulation = simulate(TIMINGS["thinker stalls early"])
    result = finish(simulation.start(TOKENS, 12))
    stalled = [c for c in simulation.calls if 0.2 < c.at_s < 3.1 and c.name.startswith("talker")]
    assert stalled == []
    assert len([c for c in simulation.called("talker.predict") if c.at_s <= 0.2]) == 1
    simulation.assert_right(result, TOKENS, 12)


def test_requests_are_stepped_as_one_batch(simulate) -> None:
    simulation = simulate(Times(0.01, 0.02, 0.01, 0.01, 0.02, 0.02, 0.01))
    prompts = [[n, n + 1, n + 2, *TOKENS] for n in range(4)]
    streams = [simulation.start(tokens, 40) for tokens in prompts]
    for tokens, stream in zip(prompts, streams, strict=True):
        simulation.assert_right(finish(stream), tokens, 40)
    for name in ("thinker.step", "talker.step", "talker.predict"):
        assert max(len(call.slots) for call in simulation.called(name)) == 4
    assert len(simulation.called("talker.predict")) < 4 * 40 / 2


def test_the_talker_does_first_what_is_nearest_to_a_first_sample(simulate) -> None:
    """A first frame, then the prompt of another request and its first frame, then others' steps."""
    # A prompt takes as long as its number of rows says, and a frame of the talker 0.1 s.
    times = Times(lambda rows: 0.01 * rows, 0.001, 0.02, 0.005, 0.05, 0.05, 0.001)
    simulation = simulate(times)
    listening = simulation.start(TOKENS, 400)
    simulation.clock.sleep(1.0)
    slow, begun = simulation.start([1] * 25, 400), simulation.clock.now()
    simulation.clock.sleep(begun + 0.249 - simulation.clock.now())
    quick = simulation.start([2], 400)
    simulation.clock.sleep(0.5)
    calls = [call for call in simulation.calls if call.name.startswith("talker")]
    own = [(call.name.removeprefix("talker."), call.slots) for call in calls]
    first = own.index(("prefill", (slow.slot,)))
    assert own[first : first + 7] == [
        ("prefill", (slow.slot,)),
        ("predict", (slow.slot,)),
        ("prepare", (quick.slot,)),
        ("prefill", (quick.slot,)),
        ("predict", (quick.slot,)),
        ("step", (listening.slot,)),
        ("predict", (listening.slot,)),
    ]


def test_a_first_chunk_is_decoded_before_all_others_that_are_due(simulate) -> None:
    simulation = simulate(Times(0.01, 0.001, 0.001, 0.001, 0.001, 0.001, 0.5))
    listening = [simulation.start(TOKENS, 4000, chunk_frames=(1, size)) for size in (8, 16)]
    simulation.clock.sleep(5.25)  # the vocoder is in a call, and all sizes are due after it
    assert all(stream._live.waiting_frames > 16 for stream in listening)
    starting = simulation.start(TOKENS, 8)
    simulation.clock.sleep(0.5)
    vocoder = [call for call in simulation.calls if call.name.startswith("vocoder")]
    assert vocoder[-1].name == "vocoder.start" and vocoder[-1].slots == (starting.slot,)


def test_streams_are_decoded_together_while_that_saves_time(simulate) -> None:
    """Four chunks of 8 frames come together; a call takes 16 frames, of who runs dry first."""
    times = Times(0.01, 0.02, 0.01, 0.01, 0.02, 0.02, 0.1)
    simulation = simulate(times, Sizes(slots=4, frames_at_once=16))
    prompts = [[n, *TOKENS] for n in range(4)]
    streams = [simulation.start(tokens, 40, chunk_frames=(1, 8)) for tokens in prompts]
    for tokens, stream in zip(prompts, streams, strict=True):
        simulation.assert_right(finish(stream), tokens, 40)
    assert {call.size for call in simulation.called("vocoder.step")} >= {16}
    assert max(call.size for call in simulation.called("vocoder.step")) == 16


def test_more_requests_than_slots_wait_in_order_and_say_so(simulate) -> None:
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=1), frames=3, max_queued=3)
    streams = [simulation.start([n, *TOKENS]) for n in range(4)]
    with pytest.raises(BusyError, match="all 1 slots are in use, and 3 requests wait"):
        simulation.start(TOKENS)
    assert [stream.queue_position for stream in streams] == [0, 1, 2, 3]
    results = [finish(stream) for stream in streams]
    for number, result in enumerate(results):
        simulation.assert_right(result, [number, *TOKENS], 3)
        assert result.timings.queued_s == pytest.approx(number)
    simulation.assert_idle()


def test_a_request_that_is_closed_in_the_queue_leaves_its_place(simulate) -> None:
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=1), max_queued=1)
    first = simulation.start(TOKENS)
    simulation.start(TOKENS).close()
    third = simulation.start(TOKENS)
    assert third.queue_position == 1
    assert len(simulation.pipeline._queue) == 1, "and takes no memory"
    for stream in (first, third):
        finish(stream)
    simulation.assert_idle()


def test_a_caller_that_does_not_read_stops_its_own_request_alone(simulate) -> None:
    simulation = simulate(Times(0.1, 0.01, 0.01, 0.05, 0.01, 0.01, 0.01))
    slow = simulation.start(TOKENS, 600, chunk_frames=(1,))
    tokens = [n % 300 for n in range(600)]
    simulation.assert_right(finish(simulation.start(tokens, 600)), tokens, 600)
    made = len(slow._live.codes)
    assert 32 <= made < 400, "bounded by what its caller, the vocoder and the talker may hold"
    simulation.assert_right(finish(slow), TOKENS, 600)
    simulation.assert_idle()
