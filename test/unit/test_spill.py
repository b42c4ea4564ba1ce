"""Rows of conversations that lost their slot, in virtual time.

The engines check that a slot holds the rows that a call says it holds. Their rows are token ids.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.events import SpeechResult
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.row_keys import BLOCK_ROWS, RowKeys
from qwen3_omni_neuron.runtime import spill
from qwen3_omni_neuron.runtime.prefix_cache import NO_ACCEPTED, CachedRows, PrefixCache
from qwen3_omni_neuron.runtime.spill import SpillLimits
from testing.prompts import keys_of
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, TimedTalker, Times

Simulate = Callable[..., Simulation]
TIMES = Times(
    thinker_prefill_s=lambda rows: rows * 0.01,
    thinker_step_s=0.02,
    talker_prepare_s=lambda rows: rows * 0.005,
    talker_step_s=0.01,
    predict_s=0.01,
    vocoder_s=0.02,
    copy_rows_s=0.001,
)
LIMITS = SpillLimits(1 << 20)
TURN_ROWS, FRAMES = 100, 5  # of a user's first words, and of a reply


@pytest.fixture
def spilling(simulate: Simulate) -> Simulate:
    """Makes simulations of two slots whose engines can copy rows."""

    def make(
        spill: SpillLimits | None = LIMITS, times: Times = TIMES, slots: int = 2, row_bytes: int = 8
    ) -> Simulation:
        return simulate(times, Sizes(slots=slots, row_bytes=row_bytes), spill=spill)

    return make


@pytest.fixture
def say(config: OmniConfig) -> Callable[..., Any]:
    """Lets conversations have their first turn, or their next one."""
    history: dict[int, list[int]] = {}

    def turn(simulation: Simulation, number: int, **options: Any) -> SpeechResult:
        before = history.get(number, [config.im_start_id, config.user_id, 100 + number] * 30)
        tokens = [*before, *range(TURN_ROWS - 90)]
        result = finish(simulation.start(tokens, FRAMES, thinker_limit=4, **options))
        assert result.token_ids == tokens[:4]
        for ours, right in zip(
            result.codes, simulation.expected_codes(tokens, FRAMES, 4), strict=True
        ):
            assert ours.tolist() == right.tolist()
        history[number] = [*tokens, *result.token_ids[:-1]]
        simulation.clock.sleep(1.0)
        return result

    return turn


def sizes(simulation: Simulation, name: str) -> list[int]:
    return [call.size for call in simulation.called(name)]


def test_a_conversation_that_lost_its_slot_computes_only_what_is_new(
    spilling: Simulate, say: Any
) -> None:
    """The talker, too. Rows after the last whole block are computed."""
    simulation = spilling()
    for number in range(4):
        assert say(simulation, number).timings.reused_tokens < BLOCK_ROWS
    for number in range(4):
        held = (TURN_ROWS + 3) // BLOCK_ROWS * BLOCK_ROWS
        assert say(simulation, number).timings.reused_tokens == held
    assert sizes(simulation, "thinker.prefill")[4:] == [TURN_ROWS + 3 + 10 - held] * 4
    user_rows = TURN_ROWS // BLOCK_ROWS * BLOCK_ROWS
    assert max(sizes(simulation, "talker.prepare")[4:]) == TURN_ROWS + 13 - user_rows + 9
    status = simulation.pipeline.status().spill
    assert status is not None
    assert status.restored_rows == {"memory": 4 * (held + user_rows), "disk": 0}
    assert (status.disk_bytes, status.failures) == (0, 0)
    assert 4 * 8 * (held + user_rows) <= status.memory_bytes <= LIMITS.memory_bytes


def test_a_turn_copies_only_its_new_rows_and_a_beginning_that_others_have_is_kept_once(
    spilling: Simulate, say: Any
) -> None:
    simulation = spilling(slots=1)
    for _ in range(3):
        say(simulation, 0)
    rows = 3 * (TURN_ROWS - 90) + 90 + 3 * 3
    assert sum(sizes(simulation, "thinker.read_rows")) == rows // BLOCK_ROWS * BLOCK_ROWS
    before = simulation.pipeline.status().spill
    finish(simulation.start([*range(3), *range(50)], FRAMES, thinker_limit=4))
    simulation.clock.sleep(1.0)
    finish(simulation.start([*range(3), *range(50), 7], FRAMES, thinker_limit=4))
    simulation.clock.sleep(1.0)
    after = simulation.pipeline.status().spill
    assert before is not None and after is not None
    # 56 and 57 rows, of which the first 53 are the same: three blocks, in each engine.
    assert after.memory_bytes - before.memory_bytes == 2 * 3 * BLOCK_ROWS * 8


def test_a_slot_is_chosen_after_one_comparison_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline's lock is held meanwhile."""
    cache = PrefixCache(3)
    keys = [keys_of(rows) for rows in (20, 30, 40)]
    for slot, one in enumerate(keys):
        cache.put(slot, CachedRows(one, len(one), NO_ACCEPTED))
    compared, shared = [], RowKeys.shared

    def compare(one: RowKeys, other: RowKeys) -> int:
        compared.append(one)
        return shared(one, other)

    monkeypatch.setattr(RowKeys, "shared", compare)
    assert cache.choose([0, 1, 2], keys_of(35)) == (2, 35)
    assert compared == keys


def test_nothing_is_copied_while_a_slot_is_empty(spilling: Simulate, say: Any) -> None:
    simulation = spilling(slots=3)
    for number in range(2):
        say(simulation, number)
    assert not simulation.called("thinker.read_rows")
    assert not simulation.called("talker.read_rows")


def test_rows_are_not_copied_out_while_somebody_waits_for_a_first_sample(
    spilling: Simulate, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes meanwhile waits for the end of one copy, here of two blocks."""
    monkeypatch.setattr(spill, "PIECE_BYTES", 2 * BLOCK_ROWS * 8)
    times = replace(TIMES, copy_rows_s=0.05)
    plain, simulation = spilling(None, times), spilling(LIMITS, times)
    waits = []
    for each in (plain, simulation):
        for first in range(2):
            finish(each.start([first, *range(300)], FRAMES, thinker_limit=4))
        start_s = each.clock.now()
        waits.append(finish(each.start(range(40, 90), FRAMES, thinker_limit=4)).timings.ttfb_s)
        decoded_s = next(c.at_s for c in each.called("vocoder.start") if c.at_s > start_s)
        each.clock.sleep(10.0)
    copied_s = [c.at_s for c in simulation.calls if c.name.endswith(".read_rows")]
    assert any(at_s < start_s for at_s in copied_s) and any(at_s > decoded_s for at_s in copied_s)
    assert not any(start_s + 2 * 0.05 < at_s < decoded_s for at_s in copied_s)
    assert waits[0] <= waits[1] <= waits[0] + 2 * 0.05


def test_rows_are_computed_where_that_is_expected_to_take_less_time(
    spilling: Simulate, say: Any
) -> None:
    """The first restore measures the copy: 16 rows in half a second, in place of 0.16."""
    simulation = spilling(times=replace(TIMES, copy_rows_s=0.5), slots=1)
    for number in (0, 1, 0):
        say(simulation, number)
        simulation.clock.sleep(60.0)
    assert simulation.called("thinker.write_rows")
    copies = len(simulation.called("thinker.write_rows"))
    assert say(simulation, 1).timings.reused_tokens < BLOCK_ROWS
    assert len(simulation.called("thinker.write_rows")) == copies


def test_steps_of_others_come_between_the_parts_of_a_long_restore(
    spilling: Simulate, say: Any
) -> None:
    simulation = spilling(times=replace(TIMES, copy_rows_s=0.04))
    for number in range(3):
        say(simulation, number)
    writing = simulation.start([11, *range(300)], 500)
    events = iter(writing)
    while not simulation.called("vocoder.step"):
        next(events)
    say(simulation, 0)
    writing.close()
    writes = [call.at_s for call in simulation.called("thinker.write_rows")]
    steps = [call.at_s for call in simulation.called("thinker.step")]
    assert len(writes) == 6
    assert steps[-1] > writes[-1]
    pauses = [any(a < at_s < b for at_s in steps) for a, b in itertools.pairwise(writes)]
    assert pauses == [False, False, True, False, False], "each part takes 0.12 s"


def test_a_cache_key_keeps_callers_apart(spilling: Simulate, say: Any, config: OmniConfig) -> None:
    simulation = spilling(slots=1)
    tokens = [config.im_start_id, config.user_id, *range(60)]
    for key, reused in (("one", 0), ("other", 0), (None, 0), ("one", 48), ("other", 48)):
        stream = simulation.start(tokens, FRAMES, thinker_limit=4, cache_key=key)
        assert finish(stream).timings.reused_tokens == reused
        simulation.clock.sleep(1.0)


@pytest.mark.parametrize("failing", ["read_rows", "write_rows"])
@pytest.mark.parametrize("engine", ["thinker", "talker"])
def test_where_the_engine_fails_to_copy_rows_are_computed(
    spilling: Simulate, say: Any, engine: str, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = spilling(slots=1)

    def fail(name: str, slots: Sequence[int]) -> None:
        if name == f"{engine}.{failing}" and len(simulation.called(name)) % 3 == 0:
            raise RuntimeError("the device does not answer")

    simulation.on_call = fail  # type: ignore[method-assign]
    for number in (0, 1, 0, 1, 0):
        say(simulation, number)
    assert "the device does not answer" in caplog.text
    simulation.assert_idle()


def test_an_engine_that_cannot_copy_rows_works_as_without(
    spilling: Simulate, say: Any, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = spilling(row_bytes=0)
    assert "spill_bytes has no effect" in caplog.text
    for number in (0, 1, 2, 0):
        say(simulation, number)
    assert simulation.pipeline.status().spill is None


def test_engines_without_a_prefix_cache_say_that_nothing_is_spilled(
    spilling: Simulate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TimedTalker, "chunked_prefill", False)
    simulation = spilling()
    assert "spill_bytes has no effect: these engines have no prefix cache, or can't" in caplog.text
    assert simulation.pipeline.status().spill is None


def test_memory_stays_within_its_limit_and_the_least_recently_used_rows_go(
    spilling: Simulate, say: Any
) -> None:
    """There is space for both engines' rows of three conversations, and four come."""
    rows = (TURN_ROWS + 3) // BLOCK_ROWS * BLOCK_ROWS + TURN_ROWS // BLOCK_ROWS * BLOCK_ROWS
    simulation = spilling(SpillLimits(3 * rows * 8), slots=1)
    for number in (0, 1, 2):
        say(simulation, number)
    status = simulation.pipeline.status().spill
    assert status is not None and status.memory_bytes == 3 * rows * 8
    finish(simulation.start([77] * 3 + [*range(97)], FRAMES, thinker_limit=4))
    simulation.clock.sleep(1.0)
    status = simulation.pipeline.status().spill
    assert status is not None and status.memory_bytes <= 3 * rows * 8
    assert say(simulation, 2).timings.reused_tokens == 96
    assert say(simulation, 0).timings.reused_tokens < BLOCK_ROWS


@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_copies_end_where_memory_is_too_small_for_one_conversation(
    spilling: Simulate, say: Any, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """It has 6 blocks in the thinker and 6 in the talker."""
    monkeypatch.setattr(spill, "PIECE_BYTES", 1)
    simulation = spilling(SpillLimits(blocks * BLOCK_ROWS * 8), slots=1)
    for turn in range(1, 3):
        say(simulation, 0)
        for name in ("thinker.read_rows", "talker.read_rows"):
            copies = len(simulation.called(name))
            assert 1 <= copies <= 8 * turn
        calls = len(simulation.calls)
        simulation.clock.sleep(1.0)
        assert calls == len(simulation.calls)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, "rows", 1, True), "spill_folder takes rows .* Give spill_bytes"),
        ((1, None, 1, False), "without a prefix cache no rows are reused"),
    ],
)
def test_wrong_limits_are_refused(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SpillLimits.of(*given)
    assert SpillLimits.of(0, None, 1, True) is None


def test_a_limit_below_one_block_is_refused_with_both_numbers(config: OmniConfig) -> None:
    said = r"spill_bytes is 100, and 16 rows .* 128 bytes\. Give more, such as 1073741824, or 0"
    with pytest.raises(OptionError, match=said):
        Simulation(config, sizes=Sizes(row_bytes=8), spill=SpillLimits(100))
