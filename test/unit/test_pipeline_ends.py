"""Requests that are closed, fail, are late, or are ended: each by itself, and nothing is left."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, LateError
from qwen3_omni_neuron.events import TextDelta
from qwen3_omni_neuron.runtime.request import WrittenReply
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.simulation import EOS, Simulation, finish
from testing.timed_engines import Sizes, Times

Simulate = Callable[..., Simulation]

TOKENS = [5, 0, 17, 17, 30, 8, 91]


@pytest.mark.parametrize("events", [0, 1, 4, 9, 15])
@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_closed_stream_frees_its_slot_within_a_step_of_each_stage(simulate, events, how) -> None:
    times = Times(0.1, 0.02, 0.01, 0.05, 0.02, 0.02, 0.01)
    simulation = simulate(times, Sizes(slots=2))
    other = simulation.start(TOKENS, 100)
    stream = simulation.start(TOKENS[::-1], 100, chunk_frames=(1,))
    for _ in range(events):
        next(stream)
    if how == "with":
        with stream:
            pass
    elif how == "drop":
        del stream
    else:
        getattr(stream, how)()
    closed_s = simulation.clock.now()
    simulation.clock.sleep(0.2)  # the longest call and one more
    assert len(simulation.pipeline._free_slots) == 1
    slot = simulation.pipeline._free_slots[0]
    late = [c for c in simulation.calls if slot in c.slots and c.at_s > closed_s + 1e-9]
    assert late == [], "no stage begins anything for a request that was closed"
    simulation.assert_right(finish(other), TOKENS, 100)
    simulation.assert_idle()


def test_a_closed_stream_frees_its_slot_where_every_stage_waits_for_its_caller(simulate) -> None:
    simulation = simulate(Times(0.1, 0.01, 0.01, 0.05, 0.01, 0.01, 0.01))
    stream = simulation.start(TOKENS, 4000, chunk_frames=(1,))
    simulation.clock.sleep(20.0)
    stream.close()
    simulation.clock.sleep(0.2)
    simulation.assert_idle()


def test_a_stream_that_another_thread_closes_at_an_event_has_no_more_of_them(simulate) -> None:
    """Nor does a reply of several pieces go on with the next one."""

    def decode(ids: list[int]) -> str:
        if ids == [11]:
            closing = threading.Thread(target=stream.close)
            closing.start()
            closing.join()
        return f"<{ids}>"

    simulation = simulate(Times(0.1, 0.05, 0.01, 0.05, 0.02, 0.02, 0.01), frames=5)
    request = simulation.request([1, 2], 5, decode_text=decode)
    pieces = [replace(request, written=WrittenReply((n, n + 1, n + 2))) for n in (10, 20, 30)]
    stream = SpeechStream(simulation.pipeline, pieces[0], owner=None, later=pieces[1:])
    assert [event.token_ids for event in stream] == [[10], [11]]  # type: ignore[union-attr]
    simulation.clock.sleep(1.0)
    simulation.assert_idle()


def test_dropping_a_stream_waits_for_no_lock(simulate) -> None:
    """A thread that collects garbage may hold a lock for which the lock's holder waits."""
    simulation = simulate(Times(0.1, 0.01, 0.01, 0.05, 0.02, 0.02, 0.01))
    streams = [simulation.start(TOKENS, 100)]
    live, mine, collected = streams[0]._live, threading.Lock(), threading.Event()

    def collect() -> None:
        with mine:
            streams.clear()
        collected.set()

    with simulation.pipeline._lock:  # as a stage in a selection, which asks for the other lock
        thread = threading.Thread(target=collect)
        thread.start()
        assert collected.wait(10) and not live.ended
        with mine:
            pass
    thread.join()
    for _ in range(1000):
        if live.ended:
            break
        threading.Event().wait(0.01)
    simulation.clock.sleep(0.2)
    simulation.assert_idle()


class EngineBrokeError(Exception):
    pass


CALLS = [
    "thinker.prefill",
    "thinker.step",
    "talker.prepare",
    "talker.prefill",
    "talker.step",
    "talker.predict",
    "vocoder.start",
    "vocoder.step",
]


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shares_cores", [False, True], ids=["split", "shared"])
@pytest.mark.diagonal
def test_a_failure_ends_the_request_it_belongs_to_and_no_other(
    simulate, name, at, shares_cores
) -> None:
    """Calls for several slots at once, too: the one at fault is found."""
    times = Times(0.1, 0.02, 0.01, 0.05, 0.02, 0.02, 0.01)
    simulation = simulate(times, shares_cores=shares_cores)
    streams = [simulation.start([n, *TOKENS], 40, chunk_frames=(1,)) for n in range(3)]
    seen = 0

    def on_call(called: str, slots: Sequence[int]) -> None:
        nonlocal seen
        if called == name and streams[1]._live.slot in slots:
            seen += 1
            once = name.endswith(("prefill", "prepare", "start"))
            if seen > (0 if once else at):
                raise EngineBrokeError(f"{name} number {seen}")

    simulation.on_call = on_call  # type: ignore[method-assign]
    failed_s = None
    with pytest.raises(EngineBrokeError, match=name):
        for _ in streams[1]:
            pass
    failed_s = simulation.clock.now()
    broke = [c for c in simulation.calls if c.name == name and streams[1]._live.slot in c.slots]
    assert failed_s - broke[-1].at_s < 1.0
    assert list(streams[1]) == [], "after its error a stream is over"
    for n in (0, 2):
        simulation.assert_right(finish(streams[n]), [n, *TOKENS], 40)
    simulation.assert_idle()
    simulation.assert_right(finish(simulation.start(TOKENS, 9)), TOKENS, 9)


@pytest.mark.parametrize("name", CALLS)
def test_a_stall_is_late_for_whoever_has_a_deadline(simulate, name) -> None:
    """One second after the last thing heard, not when the stall is over."""
    simulation = simulate(Times(0.1, 0.02, 0.01, 0.05, 0.02, 0.02, 0.01))
    stalled_s: list[float] = []

    def on_call(called: str, slots: Sequence[int]) -> None:
        if called == name and not stalled_s:
            stalled_s.append(simulation.clock.now())
            simulation.clock.sleep(50.0)

    simulation.on_call = on_call  # type: ignore[method-assign]
    hasty = simulation.start(
        [1, *TOKENS], 40, chunk_frames=(1,), first_token_timeout_s=1.0, wait_timeout_s=1.0
    )
    patient = simulation.start([2, *TOKENS], 40)
    with pytest.raises(LateError, match=r"first_token_timeout_s|wait_timeout_s"):
        list(hasty)
    assert simulation.clock.now() - stalled_s[0] <= 1.0 + 1e-6
    simulation.assert_right(finish(patient), [2, *TOKENS], 40)
    simulation.assert_idle()


@pytest.mark.parametrize(
    "times",
    [Times(0.1, 0.01, 0.01, 0.05, 0.05, 0.05, 0.01), Times(0.1, 0.01, 0.01, 0.05, 0.01, 0.01, 0.6)],
    ids=["the talker long after the text", "the vocoder long after the talker"],
)
def test_a_request_that_goes_on_is_never_late(simulate, times) -> None:
    """Each stage's last sign of life is old when the next one is still at work."""
    simulation = simulate(times)
    result = finish(simulation.start(TOKENS, 40, chunk_frames=(1,), wait_timeout_s=1.0))
    simulation.assert_right(result, TOKENS, 40)


def test_a_failure_of_our_own_ends_the_stages_requests_and_not_its_thread(simulate) -> None:
    simulation = simulate()
    broken = simulation.start(TOKENS)
    broken._live.frame_times = None  # type: ignore[assignment]
    with pytest.raises((AttributeError, TypeError)):
        list(broken)
    simulation.assert_right(finish(simulation.start(TOKENS)), TOKENS, 20)


class StrayError(BaseException):
    """Exception that no stage expects of an engine, such as SystemExit."""


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_ends_fails_the_requests_that_need_it_at_once_and_no_others(
    simulate, name
) -> None:
    """Running, queued or asked for later; nobody waits for what no thread will do."""
    times = Times(0.1, 0.02, 0.01, 0.05, 0.02, 0.02, 0.01)
    simulation = simulate(times, Sizes(slots=2))
    running, left = (simulation.start([n, *TOKENS], 4000, chunk_frames=(1,)) for n in range(2))
    queued, written = simulation.start(TOKENS), simulation.start(TOKENS, speak=False)
    left.close()
    seen: list[str] = []

    def on_call(called: str, slots: Sequence[int]) -> None:
        seen.append(called)
        if called == name and seen.count(name) == 2:
            raise StrayError("by a library")

    assert simulation.pipeline.status().fault is None
    simulation.on_call = on_call  # type: ignore[method-assign]
    stage = name.split(".", maxsplit=1)[0]
    said = rf"The {stage} stage's thread was ended by StrayError: by a library\. Load the model"
    for stream in (running, queued):
        with pytest.raises(EngineDiedError, match=said):
            list(stream)
    assert simulation.clock.now() < 60, "at once, and not by a deadline"
    with pytest.raises(EngineDiedError, match=said):
        simulation.start(TOKENS)
    if stage != "vocoder":
        with pytest.raises(EngineDiedError, match=said):
            simulation.pipeline.prefill_ahead(simulation.request(TOKENS))
    if stage == "thinker":
        with pytest.raises(EngineDiedError, match=said):
            list(written)
    else:
        assert finish(written).token_ids == [*TOKENS, EOS]
    fault = simulation.pipeline.status().fault
    assert fault is not None and fault.startswith(f"The {stage} stage's thread was ended")
    simulation.clock.sleep(1.0)  # the calls of the other stages end
    simulation.assert_idle()
    simulation.pipeline.close()
    assert not any(one.thread.is_alive() for one in simulation.pipeline._stages)


def test_closing_ends_what_runs_and_what_waits(simulate) -> None:
    simulation = simulate(Times(0.1, 0.02, 0.01, 0.05, 0.02, 0.02, 0.01), Sizes(slots=1))
    running, queued = simulation.start(TOKENS, 500), simulation.start(TOKENS)
    assert isinstance(next(running), TextDelta)
    simulation.pipeline.close()
    for stream in (running, queued):
        with pytest.raises(ClosedError, match="closed while the request ran"):
            list(stream)
    with pytest.raises(ClosedError, match="load it again"):
        simulation.start(TOKENS)
    assert not any(stage.thread.is_alive() for stage in simulation.pipeline._stages)
    simulation.pipeline.close()
