"""Many requests at once, closed early, slowed down, in processes of their own: the real engines."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.engines.noise import TALKER, Noise
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.engines.remote import RemoteEngine
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError
from qwen3_omni_neuron.events import AudioChunk, TextDelta
from testing.media_cases import QUESTION_WAV
from testing.replies import GREEDY, assert_alike, last
from testing.subprocesses import lives, wait_until

TEXT = [{"role": "user", "content": "What colour is the sky?"}]
SPOKEN = [{"role": "user", "content": [{"type": "audio", "audio": str(QUESTION_WAV)}]}]
MIXED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, who are you?"},
    {"role": "assistant", "content": "A model."},
    {
        "role": "user",
        "content": [
            {"type": "audio", "audio": (np.sin(np.arange(9000) / 9), 16000)},
            {"type": "text", "text": "What is this?"},
        ],
    },
]


def request(messages: Any, tokens: int, frames: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    limits = {"thinker_max_new_tokens": tokens, "talker_max_new_tokens": frames + 1}
    return messages, {**limits, **options}


# Different prompts, speakers, lengths and seeds; text alone among them.
REQUESTS = [
    request(TEXT, 12, 20, seed=1, predictor_top_p=0.2),
    request(SPOKEN, 6, 30, seed=2, speaker="Chelsie"),
    request(MIXED, 20, 9, seed=3, speaker="Aiden", talker_top_k=20, predictor_top_k=10),
    request(TEXT, 1, 40, **GREEDY),
    request(SPOKEN, 25, 12, **GREEDY, speaker="Chelsie"),
    request(MIXED, 3, 3, seed=6, thinker_do_sample=True, thinker_temperature=1.5),
    request(TEXT, 15, 26, seed=7, predictor_do_sample=False, chunk_frames=[4, 25]),
    request(SPOKEN, 10, 17, seed=8, talker_repetition_penalty=1.3, chunk_frames=[1]),
]


def at_once(omni: Qwen3Omni, requests: list[Any]) -> list[SpeechResult]:
    streams = [omni.stream(messages, **options) for messages, options in requests]
    return [last(stream) for stream in streams]


@pytest.fixture(scope="module")
def many(checkpoint) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=8) as omni:
        yield omni


@pytest.fixture(scope="module")
def alone(many) -> list[SpeechResult]:
    return [many.generate_audio(messages, **options) for messages, options in REQUESTS]


def test_eight_at_once_say_what_each_says_alone(many, alone) -> None:
    for order in (list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]):
        together = at_once(many, [REQUESTS[number] for number in order])
        for number, result in zip(order, together, strict=True):
            assert_alike(result, alone[number])


def test_every_frame_is_drawn_by_noise_of_its_own(many, monkeypatch) -> None:
    starts, predict = list[int](), many._pipeline._talker._engine.predict

    def watched(slots: Any, code0: Any, sampling: Any) -> Any:
        starts.extend(frame.noise for frame in sampling)
        return predict(slots, code0, sampling)

    monkeypatch.setattr(many._pipeline._talker._engine, "predict", watched)
    result = many.generate_audio(TEXT, seed=5, talker_max_new_tokens=6)
    assert starts == [Noise(5, TALKER).at(frame) for frame in range(len(result.codes))]


def test_chunks_follow_each_other_without_a_gap(many) -> None:
    messages, options = REQUESTS[7]
    chunks = [e for e in many.stream(messages, **options) if isinstance(e, AudioChunk)]
    assert [c.frames for c in chunks] == [1] * 17
    assert chunks[0].first_sample == 0
    for before, after in itertools.pairwise(chunks):
        assert after.first_sample == before.first_sample + len(before.samples)


def test_the_first_sound_comes_while_the_thinker_still_writes(many) -> None:
    limits = {"thinker_max_new_tokens": 200, "talker_max_new_tokens": 20}
    with many.stream(TEXT, **limits, **GREEDY) as stream:
        kinds = [type(event) for event in stream]
    first_sound = kinds.index(AudioChunk)
    assert TextDelta in kinds[:first_sound]
    assert TextDelta in kinds[first_sound:]


def test_a_model_that_is_closed_or_dropped_leaves_no_thread(checkpoint) -> None:
    threads = threading.active_count()
    omni = Qwen3Omni.load(checkpoint, max_concurrency=1)
    stream = omni.stream(TEXT)
    next(stream)
    omni.close()
    with pytest.raises(ClosedError):
        list(stream)
    assert threading.active_count() == threads
    Qwen3Omni.load(checkpoint, max_concurrency=1)
    wait_until(lambda: threading.active_count() == threads)


def test_a_model_that_is_closed_in_the_middle_of_a_call_ends_all_the_same(checkpoint) -> None:
    """The garbage collector may close it in the thread whose call an engine's `close` waits for."""
    calling, closed = threading.Lock(), []

    class Thinker:
        def __init__(self, engine: Any):
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def step(self, *given: Any) -> Any:
            with calling:
                if not closed:
                    closed.append(omni.close())
                return self._engine.step(*given)

        def close(self) -> None:
            assert calling.acquire(timeout=20)

    def wrap(engines: Engines) -> Engines:
        return replace(engines, thinker=Thinker(engines.thinker))  # type: ignore[arg-type]

    omni = Qwen3Omni.load(checkpoint, max_concurrency=1, wrap_engines=wrap)
    with pytest.raises(ClosedError, match="closed while the request ran"):
        list(omni.stream([{"role": "user", "content": "Hello"}], thinker_max_new_tokens=20))
    wait_until(lambda: not any(stage.thread.is_alive() for stage in omni._pipeline._stages))


def test_a_stream_keeps_its_model_alive(checkpoint) -> None:
    stream = Qwen3Omni.load(checkpoint, max_concurrency=1).stream(
        TEXT, thinker_max_new_tokens=3, talker_max_new_tokens=5, **GREEDY
    )
    assert len(last(stream).codes) == 4


@pytest.fixture
def split(checkpoint) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=8, placement="split") as omni:
        yield omni


def process_ids(omni: Qwen3Omni) -> dict[str, int]:
    engines = omni._pipeline._engines
    return {
        name: getattr(engines, name).process.pids[0] for name in ("thinker", "talker", "vocoder")
    }


@pytest.mark.usefixtures("cold_starts")
def test_engines_in_processes_of_their_own_say_the_same(split, alone) -> None:
    assert isinstance(split._pipeline._engines.talker, RemoteEngine)
    for result, expected in zip(at_once(split, REQUESTS), alone, strict=True):
        assert_alike(result, expected)
    pids = process_ids(split)
    assert len(set(pids.values()) | {os.getpid()}) == 4
    split.close()
    assert not any(lives(pid) for pid in pids.values())


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_a_process_that_dies_ends_its_requests_and_no_others(split, stage) -> None:
    short = {"thinker_max_new_tokens": 4, "talker_max_new_tokens": 120, **GREEDY}
    expected = split.generate_audio(MIXED, **short)
    options = {"thinker_max_new_tokens": 1000, "talker_max_new_tokens": 2000, **GREEDY}
    speaking = [split.stream(messages, **options) for messages in (TEXT, SPOKEN)]
    for stream in speaking:
        while not isinstance(next(stream), AudioChunk):
            pass
    written = split.stream(MIXED, **short)
    while len(written._live.token_ids) < 4:
        next(written)
    pids = process_ids(split)
    os.kill(pids[stage], signal.SIGKILL)
    killed_s = time.monotonic()
    for stream in speaking:
        with pytest.raises(EngineDiedError, match=rf"{stage} engine .* ended by SIGKILL"):
            list(stream)
    with pytest.raises(EngineDiedError, match="Load the model again"):
        split.generate_audio(TEXT, **options)
    assert time.monotonic() - killed_s < 20  # not by a deadline, which is later
    if stage == "thinker":  # it had written all of this one's text
        assert_alike(last(written), expected)
    else:
        with pytest.raises(EngineDiedError):
            list(written)
        assert len(split.generate_text(TEXT, thinker_max_new_tokens=5).token_ids) == 5
    wait_until(lambda: len(split._pipeline._free_slots) == 8)
    split.close()
    assert not any(lives(pid) for pid in pids.values())


def test_a_stalled_process_is_ended_by_close(split) -> None:
    stream = split.stream(TEXT, talker_max_new_tokens=2000, **GREEDY)
    while not isinstance(next(stream), AudioChunk):
        pass
    pids = process_ids(split)
    os.kill(pids["vocoder"], signal.SIGSTOP)
    start_s = time.monotonic()
    split.close()
    assert time.monotonic() - start_s < 10.0
    assert not any(lives(pid) for pid in pids.values())
    with pytest.raises(ClosedError):
        list(stream)
