"""Prompts computed before their request comes, and slots that keep their rows, in virtual time.

The engines check that a slot holds the rows that a call says it holds.
"""

from collections.abc import Callable, Sequence

import pytest

from qwen3_omni_neuron.runtime.pipeline import AWAITED_S
from qwen3_omni_neuron.runtime.prefill import COPY_ROWS
from qwen3_omni_neuron.runtime.request import LiveRequest
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, Times

Simulate = Callable[..., Simulation]
PER_ROW = Times(
    thinker_prefill_s=lambda rows: rows * 0.01,
    thinker_step_s=0.02,
    talker_prepare_s=lambda rows: rows * 0.001,
    talker_prefill_s=0.05,
    talker_step_s=0.01,
    predict_s=0.01,
    vocoder_s=0.02,
)


@pytest.fixture
def simulate(simulate) -> Simulate:
    """Makes simulations whose prompts take their time by rows."""
    return lambda times=PER_ROW, **kwargs: simulate(times, **kwargs)


@pytest.fixture
def spoken(config) -> Callable[..., list[int]]:
    """Makes the tokens of a user's turn, which the replies repeat."""
    return lambda *ids: [config.im_start_id, config.user_id, *ids]


def prefill_ahead(simulation: Simulation, tokens: Sequence[int], speak: bool = True) -> LiveRequest:
    return simulation.pipeline.prefill_ahead(simulation.request(tokens, speak=speak))


def sizes_of(simulation: Simulation, name: str) -> list[int]:
    return [call.size for call in simulation.called(name)]


def test_a_request_computes_what_was_not_prefilled_ahead(simulate, spoken) -> None:
    simulation = simulate()
    tokens = spoken(*range(100, 140))
    prefill_ahead(simulation, tokens[:30])
    simulation.clock.sleep(1.0)
    assert sizes_of(simulation, "thinker.prefill") == [30]
    assert sizes_of(simulation, "talker.prefill_chunk") == [30]
    simulation.assert_idle()
    result = finish(simulation.start(tokens))
    simulation.assert_right(result, tokens, 20)
    assert result.timings.reused_tokens == 30
    assert sizes_of(simulation, "thinker.prefill") == [30, 12]
    assert sizes_of(simulation, "talker.prepare") == [12 + 9]
    # 12 rows, instead of 42, and one token's frame.
    assert result.timings.ttft_s == pytest.approx(0.12)


def test_a_request_takes_the_slot_of_a_prefill_ahead(simulate, spoken) -> None:
    """The prefill's call ends; what it computed stays with the slot for the request."""
    simulation = simulate(sizes=Sizes(slots=1))
    tokens = spoken(*range(100, 140))
    prefill_ahead(simulation, tokens[:30])
    simulation.clock.sleep(0.1)
    assert not simulation.pipeline._free_slots
    result = finish(simulation.start(tokens))
    simulation.assert_right(result, tokens, 20)
    assert result.timings.reused_tokens == 30
    assert not simulation.called("talker.prefill_chunk")
    simulation.assert_idle()


def test_ending_a_prefill_ahead_waits_for_its_call_and_drops_the_rest(simulate, spoken) -> None:
    simulation = simulate()
    tokens = spoken(*range(100, 140))
    running = prefill_ahead(simulation, tokens[:30])
    simulation.clock.sleep(0.1)
    waiting = prefill_ahead(simulation, tokens)
    start_s = simulation.clock.now()
    simulation.pipeline.cancel(waiting, 10.0)
    assert simulation.clock.now() == start_s
    simulation.pipeline.cancel(running, 10.0)
    assert simulation.clock.now() == pytest.approx(0.3)
    simulation.clock.sleep(5.0)
    assert sizes_of(simulation, "thinker.prefill") == [30]
    assert not simulation.called("talker.prefill_chunk")
    simulation.assert_idle()


@pytest.mark.parametrize("failing", ["thinker.prefill", "talker.prefill_chunk"])
def test_a_prefill_ahead_that_fails_harms_nobody(simulate, spoken, failing) -> None:
    simulation = simulate()
    tokens = spoken(*range(100, 140))

    def fail(name: str, slots: Sequence[int]) -> None:
        if name == failing:
            raise RuntimeError("the engine failed")

    simulation.on_call = fail  # type: ignore[method-assign]
    prefill_ahead(simulation, tokens[:30])
    simulation.clock.sleep(1.0)
    simulation.assert_idle()
    simulation.on_call = lambda name, slots: None  # type: ignore[method-assign]
    simulation.assert_right(finish(simulation.start(tokens)), tokens, 20)


def test_a_reply_is_cached_for_the_next_turn(simulate, spoken) -> None:
    """Its last token is in no row: no step has appended it."""
    simulation = simulate()
    tokens = spoken(*range(100, 110))
    first = finish(simulation.start(tokens))
    turn = [*tokens, *first.token_ids[:-1], 5, 6, 7]
    second = finish(simulation.start(turn))
    assert second.timings.reused_tokens == len(tokens) + len(first.token_ids) - 1
    simulation.assert_right(second, turn, 20)


def test_a_request_goes_before_the_next_piece_of_a_prefill_ahead(simulate, spoken) -> None:
    simulation = simulate()
    tokens = spoken(*(100 + n % 200 for n in range(298)))
    prefill_ahead(simulation, tokens)
    simulation.clock.sleep(0.1)  # within the first piece
    question = spoken(*range(50, 60))
    simulation.assert_right(finish(simulation.start(question)), question, 20)
    first_sample_s = simulation.called("vocoder.start")[0].at_s
    simulation.clock.sleep(10.0)
    prefills = simulation.called("thinker.prefill")
    assert [call.size for call in prefills] == [128, 12, 128, 44]
    assert prefills[1].at_s == pytest.approx(1.28)
    assert prefills[2].at_s > first_sample_s
    assert sizes_of(simulation, "talker.prefill_chunk") == [128, 128, 44]
    simulation.assert_idle()
    assert finish(simulation.start([*tokens, 7])).timings.reused_tokens == 300


def test_others_take_the_slot_of_a_prefill_ahead_last_and_for_a_while_only(
    simulate, spoken
) -> None:
    simulation = simulate(sizes=Sizes(slots=2))
    mine = spoken(*range(100, 160))
    prefill_ahead(simulation, mine)
    simulation.clock.sleep(2.0)
    for n in range(4):
        finish(simulation.start(spoken(*range(n, n + 30))))
    assert finish(simulation.start([*mine, 3])).timings.reused_tokens == len(mine)
    prefill_ahead(simulation, mine)
    simulation.clock.sleep(2.0)
    both = [simulation.start(spoken(*range(n, n + 30))) for n in (50, 60)]
    assert all(stream.queue_position == 0 for stream in both)
    for stream in both:
        finish(stream)
    prefill_ahead(simulation, mine)
    simulation.clock.sleep(AWAITED_S + 2.0)
    for n in range(2):
        finish(simulation.start(spoken(*range(n, n + 30))))
    assert finish(simulation.start([*mine, 3])).timings.reused_tokens < COPY_ROWS
