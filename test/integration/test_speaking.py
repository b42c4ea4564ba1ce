"""The checkpoint that ships: a sentence is heard, answered and spoken, and a fault is audible.

What a reply says is judged by train/judge.py, which knows espeak-ng's renderings alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni, SpeechResult
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.verification.oracle import Reference
from testing.repeats import again
from testing.replies import GREEDY, assert_same
from train.assess import figures, questions, replies
from train.judge import Judge

SUM_WAV = Path(__file__).parents[2] / "examples" / "sum.wav"
SOME = [
    ("say three five", "three five"),
    ("say seven seven blue", "seven seven blue"),
    *(
        ("hi", "hello"),
        ("2 + 3 =", "five"),
        ("Who are you", "i am a small demo"),
        ("((((", "sorry"),
    ),
]
LONGEST = {"thinker_max_new_tokens": 16, "talker_max_new_tokens": 100}
CLEAR = 13.0  # of a word's distance from espeak-ng's own
HURRIED = 0.9  # of the time that espeak-ng takes for the same words


@pytest.fixture(scope="module")
def speaking() -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, dtype="float32", max_concurrency=8) as omni:
        yield omni


def user(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


def heard(judge: Judge, result: SpeechResult) -> str:
    return " ".join(word.word for word in judge.hear(result.audio))


@pytest.mark.parametrize("dtype", [again("float32"), again("bfloat16"), "int4"])
def test_questions_it_never_met_are_answered_in_the_asked_voice(judge, dtype) -> None:
    """At the released sampling settings. All of them are train/assess.py's, whose figures README
    and the model card give."""
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, dtype=dtype, max_concurrency=1) as omni:
        found = replies(omni, judge, questions(24, seed=1), seeds=[0])
    shares = figures(found)
    wrong = [
        (r.question.reply, r.text, r.recognised, r.speaker, r.voices) for r in found if not r.right
    ]
    assert len(wrong) <= 1, wrong
    assert shares.ended == shares.unspoken == 1.0
    assert shares.right_voice > 0.97


def test_a_spoken_sum_is_heard_and_answered(speaking, judge) -> None:
    question = [{"role": "user", "content": [{"type": "audio", "audio": str(SUM_WAV)}]}]
    result = speaking.generate_audio(question, seed=0, **LONGEST)
    assert result.text == heard(judge, result) == "eight"


def test_what_a_visitor_types_first_is_answered(speaking) -> None:
    assert [speaking.generate_text(user(words), seed=0).text for words, _ in SOME] == [
        reply for _, reply in SOME
    ]


@pytest.mark.parametrize("spoken", [True, False])
def test_transformers_answers_code_for_code(speaking, spoken) -> None:
    reference = Reference(SPEAKING_CHECKPOINT)
    asked = [q for q in questions(16, seed=2) if q.spoken == spoken and "(" not in q.reply][:3]
    for question in asked:
        ours = speaking.generate_audio(question.messages, **GREEDY, **LONGEST)
        prompt = speaking.prompt_builder.prompt(question.messages)
        end = {"thinker_eos_token_id": speaking._config.im_end_id}
        theirs = reference.generate(prompt, **end, **LONGEST)
        assert ours.text == question.reply
        assert ours.token_ids == theirs.token_ids
        assert_same(ours, theirs, reference)


# What a port gets wrong, put in on purpose: every one must be audible.


class _Talker:
    """The talker, its text rows changed. token_ids: of the reply, its end included."""

    def __init__(self, engine: Any, token_ids: Sequence[int], eos: int, pad: int):
        self._engine, self._pad = engine, pad
        self._first, *self._rows = self.fed([*token_ids[:-1], eos], eos, pad)
        self._step = 0

    def fed(self, rows: list[int], eos: int, pad: int) -> list[int]:
        """The tokens whose rows are fed, the last of them again and again."""
        return [*rows, pad]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, slot: int, accepted: torch.Tensor, first_token: int) -> torch.Tensor:
        return self._engine.prefill(slot, accepted, self._first)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        token = self._rows[min(self._step, len(self._rows) - 1)]
        self._step += 1
        return self._engine.step(slots, [token])


class RowsOneEarly(_Talker):
    def fed(self, rows: list[int], eos: int, pad: int) -> list[int]:
        return [rows[0], *rows[2:], pad]


class FirstTokenDropped(_Talker):
    def fed(self, rows: list[int], eos: int, pad: int) -> list[int]:
        return [*rows[1:], pad]


class EndRepeated(_Talker):
    def fed(self, rows: list[int], eos: int, pad: int) -> list[int]:
        return [*rows, eos]


class WrongHiddenState(_Talker):
    """The code predictor starts from the hidden state of the frame before."""

    def predict(self, slots: Sequence[int], *rest: Any) -> torch.Tensor:
        hidden = self._engine._hidden
        now = hidden[slots[0]].clone()
        hidden[slots[0]] = getattr(self, "_before", now)
        self._before = now
        return self._engine.predict(slots, *rest)


class LostSamples:
    """A vocoder that drops 555 samples, 23 ms, at every boundary of two chunks."""

    def __init__(self, engine: Any, *_: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, slots: Sequence[int], codes: Sequence[torch.Tensor]) -> list[Any]:
        return [samples[555:] for samples in self._engine.step(slots, codes)]


def faultless(judge: Judge, result: SpeechResult, reply: str) -> bool:
    """Return whether the audio says the reply in Ethan's voice, clearly, at pace, to its end."""
    words = judge.hear(result.audio)
    said = " ".join(word.word for word in words) == reply
    clear = all(word.speaker == "ethan" and word.distance < CLEAR for word in words)
    pace = np.mean([word.pace for word in words])
    return said and clear and pace > HURRIED and result.talker_finish_reason == "stop"


@pytest.mark.parametrize(
    "fault", [_Talker, RowsOneEarly, FirstTokenDropped, EndRepeated, WrongHiddenState, LostSamples]
)
def test_a_fault_is_audible(speaking, judge, fault) -> None:
    ends = speaking._config.tts_eos_id, speaking._config.tts_pad_id
    right = []
    for words, reply in SOME[:2]:
        token_ids = speaking.generate_text(user(words), **GREEDY, **LONGEST).token_ids

        def put_in(engines: Engines, token_ids: list[int] = token_ids) -> Engines:
            if fault is LostSamples:
                return replace(engines, vocoder=fault(engines.vocoder))
            return replace(engines, talker=fault(engines.talker, token_ids, *ends))

        with Qwen3Omni.load(
            SPEAKING_CHECKPOINT, dtype="float32", max_concurrency=1, wrap_engines=put_in
        ) as omni:
            result = omni.generate_audio(user(words), seed=0, chunk_frames=(1,), **LONGEST)
        assert result.text == reply
        right.append(faultless(judge, result, reply))
    assert right == [fault is _Talker] * 2
