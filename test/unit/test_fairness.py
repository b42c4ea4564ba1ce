"""Turns of owners: no owner's request waits for more than one of another owner's."""

from collections.abc import Callable

import pytest

from qwen3_omni_neuron.errors import BusyError
from qwen3_omni_neuron.runtime.fairness import KEPT_S
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, Times

Simulate = Callable[..., Simulation]

TOKENS = [5, 0, 17, 17, 30, 8, 91]


def test_a_request_waits_for_one_prefill_of_another_owner_and_not_for_all(
    simulate: Simulate,
) -> None:
    """It is so with those that have slots and those that wait for one."""
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=4), frames=3)
    finish(simulation.start([9], owner="b"))  # from now on a slot is kept for it
    many = [simulation.start([n, *TOKENS], owner="a") for n in range(8)]
    mine = simulation.start([9, 9], owner="b")
    assert mine.queue_position == 0
    result = finish(mine)
    simulation.assert_right(result, [9, 9], 3)
    assert result.timings.ttft_s <= 2.1, "the prefill that runs, and its own"
    for number, stream in enumerate(many):
        simulation.assert_right(finish(stream), [number, *TOKENS], 3)
    simulation.assert_idle()


def test_a_short_prompt_comes_between_two_chunks_of_another_owners_long_one(
    simulate: Simulate,
) -> None:
    simulation = simulate(Times(lambda rows: rows * 1e-3, 0.01), Sizes(slots=4), frames=3)
    other = simulation.start([7] * 900, owner="c", speak=False)
    next(iter(other))
    long = simulation.start([8] * 3000, owner="a", speak=False)
    mine = finish(simulation.start([9] * 200, owner="b", speak=False, thinker_limit=1))
    assert mine.timings.ttft_s < 0.6, "its own two chunks, and three of the other's at most"
    assert finish(long).timings.ttft_s > 3
    finish(other)
    simulation.assert_idle()


def test_a_request_of_an_owner_without_a_slot_is_the_next_to_get_one(simulate: Simulate) -> None:
    simulation = simulate(Times(thinker_prefill_s=1.0), Sizes(slots=1), frames=3)
    many = [simulation.start([n], owner="a") for n in range(4)]
    assert finish(simulation.start([9], owner="b")).timings.queued_s <= 1.1
    results = [finish(stream) for stream in many]
    assert [round(result.timings.queued_s) for result in results] == [0, 2, 3, 4]


def test_the_last_slot_is_kept_for_an_owner_who_came_lately(simulate: Simulate) -> None:
    simulation = simulate(
        Times(thinker_prefill_s=0.6 * KEPT_S), Sizes(slots=2), frames=3, max_queued=1
    )
    finish(simulation.start([9], owner="b"))
    first, second = (simulation.start([n], owner="a") for n in range(2))
    assert (first.queue_position, second.queue_position) == (0, 1)
    with pytest.raises(BusyError, match="the last slot is kept for another owner, and 1 requests"):
        simulation.start([3], owner="a")
    for stream in (first, second):  # one after the other, in which time b has been forgotten
        finish(stream)
    streams = [simulation.start([n], owner="a") for n in range(2)]
    assert [stream.queue_position for stream in streams] == [0, 0]
    for stream in streams:
        finish(stream)
    simulation.assert_idle()


def test_a_slot_that_is_kept_no_longer_goes_to_who_waits(simulate: Simulate) -> None:
    """At that time, not when a request comes or ends, and also where no stage has work by then."""
    simulation = simulate(Times(thinker_step_s=0.1), Sizes(slots=2), frames=3)
    finish(simulation.start([9], owner="b", speak=False))
    came_s = simulation.clock.now()
    unread = simulation.start([7] * 2000, owner="a", speak=False, thinker_limit=2000)
    second = simulation.start([8], owner="a", speak=False)
    assert second.queue_position == 1
    assert finish(second).timings.queued_s == pytest.approx(KEPT_S - came_s, abs=0.5)
    closed, third = (simulation.start([8], owner="a", speak=False) for _ in range(2))
    unread.close()
    for stream in (closed, third):
        stream.close()
    simulation.clock.sleep(0.2)
    simulation.assert_idle()


def test_no_slot_is_kept_for_requests_without_an_owner(simulate: Simulate) -> None:
    simulation = simulate(sizes=Sizes(slots=2))
    finish(simulation.start([9]))
    streams = [simulation.start([n], owner="a") for n in range(2)]
    assert [stream.queue_position for stream in streams] == [0, 0]
    for stream in streams:
        finish(stream)
