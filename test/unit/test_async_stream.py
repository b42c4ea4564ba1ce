"""A stream read in an event loop: the same events, without a thread and without blocking."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import AudioChunk, Finished, Qwen3Omni, TextDelta
from qwen3_omni_neuron.runtime.stream import SpeechStream

HELLO = [{"role": "user", "content": "Hello"}]
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 12, "talker_max_new_tokens": 16}
NEVER_S = 1e9


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


def test_eight_streams_in_one_loop_give_what_each_gives_alone(omni) -> None:
    alone = [omni.generate_audio(HELLO, seed=seed, **LIMITS) for seed in range(8)]

    async def together() -> list[list[Any]]:
        streams = [omni.stream(HELLO, seed=seed, **LIMITS) for seed in range(8)]
        return await asyncio.gather(*map(events_of, streams))

    for events, expected in zip(asyncio.run(together()), alone, strict=True):
        assert isinstance(events[-1], Finished)
        result = events[-1].result
        assert result.text == "".join(e.text for e in events if isinstance(e, TextDelta))
        assert result.token_ids == expected.token_ids
        assert result.codes.tolist() == expected.codes.tolist()
        samples = [e.samples for e in events if isinstance(e, AudioChunk)]
        np.testing.assert_allclose(np.concatenate(samples), expected.audio, atol=1e-5)


def test_ready_events_are_the_stream_with_one_chunk_at_most_at_their_end(omni, monkeypatch) -> None:
    """Audio and the end wait for nothing, and bring along text that would wait for ever."""
    expected = omni.generate_audio(HELLO, seed=3, **LIMITS)
    engine = omni._pipeline._engines.thinker
    original = engine.step

    def slow(*arguments: Any) -> Any:  # the reader has the first token before there are others
        time.sleep(0.02)
        return original(*arguments)

    monkeypatch.setattr(engine, "step", slow)

    async def bursts_of(text_alone: bool) -> list[list[Any]]:
        ask = omni.stream_text if text_alone else omni.stream
        stream = ask(HELLO, seed=3, chunk_frames=(1,), **LIMITS)
        bursts = [await stream.ready(0.0)]
        while not isinstance(bursts[-1][-1], Finished):
            bursts.append(await stream.ready(NEVER_S))
            if sum(isinstance(event, AudioChunk) for burst in bursts for event in burst) == 2:
                assert not stream._live.ended, "audio comes while the reply is made"
        return bursts

    for text_alone in (False, True):
        bursts = asyncio.run(asyncio.wait_for(bursts_of(text_alone), 60))
        events = [event for burst in bursts for event in burst]
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == expected.text
        assert isinstance(events[-1], Finished)
        assert events[-1].result.token_ids == expected.token_ids
        chunks = [event for event in events if isinstance(event, AudioChunk)]
        assert bool(chunks) != text_alone
        assert sum(len(chunk.samples) for chunk in chunks) == len(events[-1].result.audio)
        for burst in bursts[:-1]:
            assert not any(isinstance(event, AudioChunk) for event in burst[:-1])
        # The first text, text until the audio or the end, chunks. The end comes with what is last,
        # unless the reader has that before the request has ended, as it may have a last chunk.
        assert len(bursts) <= 2 + len(chunks) + bool(chunks)
        assert len(bursts[-1]) > 1 or chunks
        assert len(events) > len(bursts)


def slots_are_free(omni: Qwen3Omni) -> bool:
    end_s = time.monotonic() + 5
    while omni.status().running and time.monotonic() < end_s:
        time.sleep(0.01)
    return omni.status().running == 0


def test_a_task_that_is_cancelled_between_two_bursts_cancels_the_request(omni, monkeypatch) -> None:
    engine, may_step = omni._pipeline._engines.thinker, threading.Event()
    original = engine.step

    def held(*arguments: Any) -> Any:  # the request still runs when the task is cancelled
        assert may_step.wait(60)
        return original(*arguments)

    monkeypatch.setattr(engine, "step", held)

    async def cancelled() -> SpeechStream:
        stream = omni.stream_text(HELLO, thinker_max_new_tokens=100, seed=3)

        async def read() -> None:
            await stream.ready(0.0)
            read_one.set()
            await stream.ready(NEVER_S)

        read_one, reading = asyncio.Event(), asyncio.create_task(read())
        await asyncio.wait_for(read_one.wait(), 60)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return stream

    stream = asyncio.run(cancelled())  # which is alive here, so that it is not for dropping it
    may_step.set()
    assert slots_are_free(omni)
    assert stream._live.token_ids and len(stream._live.token_ids) < 100


def test_a_cancel_is_not_lost_where_an_event_comes_at_the_same_moment(omni) -> None:
    """By its wake-up and its cancel in one turn of the loop: the task ends, and takes no event."""

    async def cancelled() -> None:
        stream = omni.stream(HELLO, thinker_max_new_tokens=1000, talker_max_new_tokens=1000)
        output = stream._live.output

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        with output.changed:  # no stage can put anything meanwhile
            while output.on_change is None:
                await asyncio.sleep(0)
            output.put(0)
            await asyncio.sleep(0)  # the wait has ended, and its task has not run yet
            reading.cancel()
        await asyncio.wait({reading}, timeout=5)
        assert reading.cancelled()

    asyncio.run(cancelled())
    assert slots_are_free(omni)


def test_status_and_info_say_what_runs(omni) -> None:
    assert omni.info.speakers == ("Aiden", "Chelsie", "Ethan")
    assert (omni.info.slots, omni.info.thinks, omni.info.takes_tools) == (3, False, False)
    assert slots_are_free(omni)
    before = omni.status()
    streams = [omni.stream(HELLO, thinker_max_new_tokens=1000) for _ in range(5)]
    during = omni.status()
    assert during.queued == 2
    assert during.running == 3
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    assert slots_are_free(omni)
    after = omni.status()
    assert after.queued == 0
    assert set(after.stages) == {"encoder", "thinker", "talker", "vocoder"}
    assert after.stages["thinker"].calls > before.stages["thinker"].calls
    assert after.stages["thinker"].busy_s > before.stages["thinker"].busy_s


def test_async_with_ends_the_request_and_returns_the_stream(omni) -> None:
    async def left_early() -> SpeechStream:
        async with omni.stream("Hello", seed=1) as stream:
            async for event in stream:
                assert isinstance(event, TextDelta | AudioChunk)
                return stream
        raise AssertionError("no event came")

    async def in_an_error() -> None:
        async with omni.stream("Hello", seed=1) as stream:
            streams.append(stream)
            raise KeyError("the caller's own")

    streams = [asyncio.run(left_early())]
    with pytest.raises(KeyError, match="the caller's own"):
        asyncio.run(in_an_error())
    for stream in streams:
        assert stream._live.ended
        assert next(stream, None) is None
