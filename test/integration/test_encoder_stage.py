"""Long media are encoded while the thinker goes on with others; long prompts come in pieces."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Encoder, Engines
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.runtime import policy
from testing.media_cases import audio, image, text, user
from testing.recorded_calls import ungated, watching
from testing.replies import assert_alike

Messages = list[dict[str, Any]]
# 320 rows of a picture, between text and speech.
LONG: Messages = [user(text("Look."), image(640, 512), audio(9.0), text("What is that?"))]
HELLO: Messages = [user(text("Hello"))]
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8, "seed": 1}
# More tokens than a stream that nobody reads has room for, and greedy speech, which does not end.
ENDLESS: dict[str, Any] = {
    **{"thinker_max_new_tokens": 3000, "thinker_eos_token_id": 10**6},
    **{"talker_do_sample": False, "predictor_do_sample": False},
}


@dataclass
class GatedEncoder:
    """An encoder that waits, and may fail."""

    encoder: Encoder | None = None
    calls: list[int] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wrap(self, engines: Engines) -> Engines:
        self.encoder = engines.encoder
        return replace(engines, encoder=self)

    def encode(self, prompt: Prompt, start: int = 0) -> PromptMedia | None:
        self.calls.append(start)
        self.entered.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return self.encoder.encode(prompt, start)


@pytest.fixture
def gated() -> GatedEncoder:
    return GatedEncoder()


@pytest.fixture
def omni(checkpoint, gated) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, max_concurrency=2, wrap_engines=gated.wrap) as omni:
        yield omni


@pytest.fixture(scope="module")
def inline(checkpoint_of_seed) -> SpeechResult:
    """The reply to LONG where the thinker's call encodes and prefills all of it."""
    wrap = lambda engines: replace(engines, encoder=None)  # noqa: E731
    with Qwen3Omni.load(checkpoint_of_seed(1), reuse=False, wrap_engines=wrap) as omni:
        return omni.generate_audio(LONG, **LIMITS)


def test_others_go_on_while_a_picture_is_encoded(omni, gated, inline) -> None:
    long = omni.stream(LONG, **LIMITS)
    assert gated.entered.wait(30)
    assert omni.generate_audio(HELLO, **LIMITS).text
    gated.gate.set()
    *_, finished = long
    assert_alike(finished.result, inline)
    assert gated.calls == [0]
    assert omni.status().stages["encoder"].calls == 1


def test_a_short_prompt_passes_no_encoder_stage(omni, gated) -> None:
    omni.generate_audio([user(image(64, 64), audio(9.0))], **LIMITS)
    assert not gated.calls


def test_rows_that_a_slot_holds_are_not_encoded_again(omni, gated, inline) -> None:
    gated.gate.set()
    first = omni.generate_audio(LONG, **LIMITS)
    assert_alike(omni.generate_audio(LONG, **LIMITS), first)
    assert_alike(first, inline)
    assert gated.calls == [0, first.timings.prompt_tokens]


def test_an_encoder_that_fails_ends_its_request_alone(omni, gated) -> None:
    gated.gate.set()
    gated.error = RuntimeError("no memory for a picture")
    with pytest.raises(RuntimeError, match="no memory for a picture"):
        omni.generate_audio(LONG, **LIMITS)
    assert omni.generate_audio(HELLO, **LIMITS).text
    gated.error = None
    assert omni.generate_audio(LONG, **LIMITS).text


def test_a_request_that_is_closed_while_it_is_encoded_frees_its_slot(omni, gated, inline) -> None:
    long = omni.stream(LONG, **LIMITS)
    assert gated.entered.wait(30)
    long.close()
    gated.gate.set()
    for _ in range(2):  # as many as there are slots
        assert_alike(omni.generate_audio(LONG, **LIMITS), inline)


@pytest.mark.parametrize("apart", [True, False])
def test_a_long_prompt_in_pieces_is_the_whole_to_the_bit(
    checkpoint, inline, monkeypatch, apart
) -> None:
    """Between two pieces others go on; a picture that no stage encodes is never cut."""
    monkeypatch.setattr(policy, "PREFILL_CHUNK_S", 1e-9)
    calls = ungated()

    def wrap(engines: Engines) -> Engines:
        engines = watching(calls)(engines)
        return engines if apart else replace(engines, encoder=None)

    with Qwen3Omni.load(checkpoint, max_concurrency=2, wrap_engines=wrap) as omni:
        omni.generate_audio(HELLO, **LIMITS)  # how long a row takes is known now
        with omni.stream_text(HELLO, **ENDLESS) as other:
            next(iter(other))
            calls.made.clear()
            result = omni.generate_audio(LONG, **LIMITS)
    assert_alike(result, inline)
    assert result.timings.reused_tokens < 8, "its own pieces are none"
    pieces = calls.rows("thinker.prefill")
    assert (len(pieces) > 2) == apart
    assert sum(pieces) >= inline.timings.prompt_tokens - 8  # but what the two share
    assert max(pieces) <= policy.LEAST_CHUNK_ROWS or not apart


def test_rows_that_were_dropped_while_others_were_encoded_are_encoded_again(
    checkpoint, inline, gated
) -> None:
    """A slot held the picture when the encoder began with the speech after it, and then no more."""
    picture = [user(*LONG[0]["content"][:2])]
    with Qwen3Omni.load(checkpoint, max_concurrency=2, wrap_engines=gated.wrap) as omni:
        gated.gate.set()
        omni.generate_audio(picture, **LIMITS)
        gated.gate.clear()
        gated.entered.clear()
        stream = omni.stream(LONG, **LIMITS)
        assert gated.entered.wait(30)
        held = omni._pipeline._thinker.cache
        for slot in range(2):
            held.put(slot, None)
        gated.gate.set()
        *_, finished = stream
    assert_alike(finished.result, inline)
    assert 300 < gated.calls[1] < inline.timings.prompt_tokens - 100, "it was told what is held"
