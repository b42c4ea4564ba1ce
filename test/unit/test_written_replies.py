"""Replies that are written before their request: the thinker has no work."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from qwen3_omni_neuron.events import AudioChunk, Finished, SpeechResult
from qwen3_omni_neuron.prompt.prompt import NO_KEYS
from qwen3_omni_neuron.runtime.request import Request, WrittenReply
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, Times

TOKENS = [5, 0, 17, 17, 30, 8, 91]
TAKES_TIME = Times(0.1, 0.02, 0.01, 0.05, 0.008, 0.01, 0.02)
SOME = ([5, 0, 17], [17, 30], [8, 91, 3, 4], [6])
Simulate = Callable[..., Simulation]


def written(
    simulation: Simulation, tokens: Sequence[int], frames: int = 20, before: str = ""
) -> Request:
    request = simulation.request(tokens, frames)
    assert request.keys is not None
    keys = replace(request.keys, thinker=NO_KEYS)
    return replace(request, keys=keys, written=WrittenReply(tuple(tokens), before))


def speak(simulation: Simulation, *pieces: Sequence[int], frames: int = 20) -> SpeechStream:
    first, *later = (
        written(simulation, piece, frames, " " if number else "")
        for number, piece in enumerate(pieces)
    )
    return SpeechStream(simulation.pipeline, first, simulation, later)


def frames_of(simulation: Simulation, *pieces: Sequence[int], frames: int = 20) -> np.ndarray:
    codes = [code for piece in pieces for code in simulation.expected_codes(piece, frames)]
    return np.stack([code.numpy() for code in codes])


@pytest.mark.parametrize("tokens", range(1, 8))
@pytest.mark.parametrize("shares_cores", [False, True])
def test_a_written_reply_is_spoken_as_one_of_the_thinker(simulate, tokens, shares_cores) -> None:
    simulation = simulate(shares_cores=shares_cores)
    for frames in (1, tokens, 30):
        result = finish(speak(simulation, TOKENS[:tokens], frames=frames))
        assert not [call for call in simulation.calls if call.name.startswith("thinker")]
        assert np.array_equal(result.codes, frames_of(simulation, TOKENS[:tokens], frames=frames))
        assert result.token_ids == TOKENS[:tokens]
        assert result.thinker_finish_reason == "stop"
        assert result.timings.ttft_s == result.timings.queued_s == 0
        assert (result.timings.prompt_tokens, result.timings.text_tokens) == (0, tokens)
    simulation.assert_idle()


def test_pieces_are_one_stream_in_one_slot(simulate) -> None:
    simulation = simulate(sizes=Sizes(slots=2))
    stream = speak(simulation, *SOME)
    slots, chunks, result = set(), [], None
    for event in stream:
        slots.add(stream.slot)
        if isinstance(event, AudioChunk):
            chunks.append(event)
        elif isinstance(event, Finished):
            result = event.result
    assert isinstance(result, SpeechResult)
    assert len(slots) == 1
    ends = [chunk.first_sample + len(chunk.samples) for chunk in chunks]
    assert [chunk.first_sample for chunk in chunks] == [0, *ends[:-1]]
    assert np.array_equal(result.audio, np.concatenate([chunk.samples for chunk in chunks]))
    assert np.array_equal(result.codes, frames_of(simulation, *SOME))
    latency = simulation.pipeline.latency_samples
    assert len(result.audio) == 80 * 1920 - latency
    for piece in range(1, 4):
        join = piece * 20 * 1920
        assert not result.audio[join - latency : join].any()
        assert result.audio[join - latency - 1] != 0 != result.audio[join]
    assert result.text == " ".join("".join(map(str, piece)) for piece in SOME)
    assert result.token_ids == [token for piece in SOME for token in piece]
    assert result.talker_finish_reason == "length"
    assert (result.timings.frames, result.timings.text_tokens) == (80, 10)
    simulation.assert_idle()


@pytest.mark.parametrize("events", [0, 1, 4, 8, 12])
def test_a_stream_that_is_closed_frees_its_slot_and_begins_no_other_piece(simulate, events) -> None:
    simulation = simulate(TAKES_TIME, sizes=Sizes(slots=1))
    piece_s = finish(speak(simulation, SOME[0])).timings.total_s
    stream = speak(simulation, *SOME)
    for _ in range(events):
        next(stream)
    stream.close()
    assert finish(simulation.start(TOKENS)).timings.queued_s < piece_s / 2
    simulation.assert_idle()


def test_an_error_in_one_piece_ends_them_all(simulate) -> None:
    simulation = simulate(TAKES_TIME, sizes=Sizes(slots=1))
    fails = iter([False, True])

    def on_call(name: str, slots: Sequence[int]) -> None:
        if name == "talker.prefill" and next(fails, False):
            raise RuntimeError("the second piece")

    simulation.on_call = on_call  # type: ignore[method-assign]
    stream = speak(simulation, *SOME)
    with pytest.raises(RuntimeError, match="the second piece"):
        finish(stream)
    finish(simulation.start(TOKENS))
    assert len(simulation.called("talker.prepare")) == 3  # two pieces', and this one's
    simulation.assert_idle()


def test_the_thinkers_rows_in_the_slot_stay_what_they_were(simulate) -> None:
    simulation = simulate(Times(), sizes=Sizes(slots=1))
    first = finish(simulation.start(TOKENS))
    finish(speak(simulation, *SOME))
    again = finish(simulation.start(TOKENS))
    assert first.timings.reused_tokens == 0
    assert again.timings.reused_tokens == len(TOKENS) - 1
    assert np.array_equal(first.codes, again.codes)
