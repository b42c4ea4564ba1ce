"""Assess the speaking checkpoint on questions that its training left out.

    python -m train.assess CHECKPOINT

Questions that have an answer, and as many that have none, are asked through the package at the
released sampling settings, once for each seed, in each speaker's voice in turn; half of them are
spoken, in each of CONDITIONS in turn. The judge (train/judge.py) compares the speech of the first
ones with espeak-ng's own renderings; nothing of ours trained it.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jiwer
from tqdm import tqdm

from qwen3_omni_neuron import Qwen3Omni
from train.espeak import VOICES
from train.judge import Judge
from train.questions import Question, draw_question
from train.speech import MEASURING, Variation

MOST_TEXT_TOKENS = 16
MOST_FRAMES = 100
CONDITIONS = {
    "as measured": MEASURING,
    "3.4 kHz and mu-law": replace(MEASURING, telephone=1.0),
    "white noise at 20 dB": replace(MEASURING, noises=(0.0,), below_db=(20.0, 20.0)),
    "-30 dB": replace(MEASURING, peaks=(0.03, 0.03)),
    "up to a second of silence": replace(MEASURING, edges_s=(1.0,)),
}


@dataclass(frozen=True)
class Figures:
    """Shares of 1.

    replies_right: replies whose text is right; known_right, sorry: of the questions that have an
    answer, and of those that have none; answered: replies that are not empty and reached no limit;
    heard_word_error: word error rate of replies that repeat spoken words; spoken_word_error: of the
    speech against the text; right_voice: spoken words in the right voice; ended: replies whose
    talker ended by itself; unspoken: replies without speech among those that were to be text only.
    """

    replies: int
    replies_right: float
    known_right: float
    sorry: float
    answered: float
    heard_word_error: float
    spoken_word_error: float
    right_voice: float
    ended: float
    unspoken: float


@dataclass(frozen=True)
class Share:
    """A number of cases among all of them."""

    count: int
    of: int

    @property
    def value(self) -> float:
        """Return it as a share of 1."""
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Return Wilson's interval of 95 %, as if the cases did not depend on each other."""
        n, z = self.of, 1.96
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = (
            z / (1 + z * z / n) * math.sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n))
        )
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Reply:
    """A reply to one question.

    recognised: the words that the judge heard, None where it was not asked; voices: of each word.
    """

    question: Question
    speaker: str
    seed: int
    text: str
    recognised: str | None
    voices: tuple[str, ...]
    ended: bool
    text_ended: bool

    @property
    def text_only(self) -> bool:
        return self.question.reply.startswith("(")

    @property
    def right(self) -> bool:
        """True where text, speech, voice and end are all right."""
        spoken = "" if self.text_only else self.question.reply
        voices = set(self.voices) <= {self.speaker}
        said = self.recognised in (None, spoken)
        return self.text == self.question.reply and said and voices and self.ended


def questions(
    count: int,
    seed: int,
    known: bool | None = None,
    conditions: Sequence[Variation] = (MEASURING,),
) -> list[Question]:
    """Draw questions that training left out, half of them in speech, in each condition in turn.

    known: they have an answer, or have none; None: some of both.
    """
    rng = random.Random(f"assess {seed}")
    return [
        draw_question(
            rng,
            conditions[number // 2 % len(conditions)],
            held_out=True,
            spoken=number % 2 == 0,
            known=known,
        )
        for number in range(count)
    ]


def replies(
    omni: Qwen3Omni,
    judge: Judge,
    asked_for: Sequence[Question],
    seeds: Sequence[int],
    judged: int | None = None,
) -> list[Reply]:
    """Ask every question once for each seed. judged: so many are heard by the judge; None: all."""
    turns = [(seed, number) for seed in seeds for number in range(len(asked_for))]
    return [
        reply(
            omni,
            judge if judged is None or done < judged else None,
            asked_for[number],
            sorted(VOICES)[(number + seed) % 3],
            seed,
        )
        for done, (seed, number) in enumerate(tqdm(turns, "asked"))
    ]


def reply(
    omni: Qwen3Omni, judge: Judge | None, question: Question, speaker: str, seed: int
) -> Reply:
    """Ask one question, and recognise its speech."""
    result = omni.generate_audio(
        question.messages,
        speaker=speaker,
        seed=seed,
        thinker_max_new_tokens=MOST_TEXT_TOKENS,
        talker_max_new_tokens=MOST_FRAMES,
    )
    heard = judge.hear(result.audio) if judge else []
    return Reply(
        question,
        speaker,
        seed,
        result.text,
        " ".join(word.word for word in heard) if judge else None,
        tuple(word.speaker for word in heard),
        result.talker_finish_reason == "stop",
        result.thinker_finish_reason == "stop",
    )


def shares(found: Sequence[Reply]) -> dict[str, Share]:
    """Count the cases of each figure; those without a case are left out."""
    aloud = [r for r in found if not r.text_only and r.text and r.recognised is not None]
    silent = [r for r in found if r.text_only and r.recognised is not None]
    again = [r for r in found if r.question.spoken and r.question.prompt.says_again]
    counted = {
        "replies_right": _count([r.text == r.question.reply for r in found]),
        "known_right": _count(
            [r.text == r.question.reply for r in found if r.question.prompt.known]
        ),
        "sorry": _count([r.text == r.question.reply for r in found if not r.question.prompt.known]),
        "answered": _count([bool(r.text) and r.text_ended and r.ended for r in found]),
        "heard_word_error": _errors([(r.question.reply, r.text) for r in again]),
        "spoken_word_error": _errors([(r.text, r.recognised or "") for r in aloud]),
        "right_voice": _count([voice == r.speaker for r in aloud for voice in r.voices]),
        "ended": _count([r.ended for r in found]),
        "unspoken": _count([not r.recognised for r in silent]),
    }
    return {name: share for name, share in counted.items() if share.of}


def figures(found: Sequence[Reply]) -> Figures:
    """Compute the figures of all replies."""
    return Figures(len(found), **{name: share.value for name, share in shares(found).items()})


def asked_in(question: Question) -> str:
    """Return the words of a question, or its text."""
    return question.prompt.words if question.spoken else str(question.messages[-1]["content"])


def _count(right: Sequence[bool]) -> Share:
    return Share(sum(right), len(right))


def _errors(pairs: Sequence[tuple[str, str]]) -> Share:
    """Count the wrong, missing and added words. pairs: right text, and text to compare."""
    if not pairs:
        return Share(0, 0)
    found = jiwer.process_words([right for right, _ in pairs], [text for _, text in pairs])
    wrong = found.substitutions + found.deletions + found.insertions
    return Share(wrong, found.hits + found.substitutions + found.deletions)


def main(arguments: list[str] | None = None) -> None:
    """Assess a checkpoint; print wrong replies, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--questions", type=int, default=500, help="of each kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--judged", type=int, default=600, help="replies that the judge hears")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    with Qwen3Omni.load(options.checkpoint, dtype=options.dtype, max_concurrency=1) as omni:
        asked = [
            question
            for both in zip(
                *(
                    questions(options.questions, 0, known, tuple(CONDITIONS.values()))
                    for known in (True, False)
                ),
                strict=True,
            )
            for question in both
        ]
        found = replies(omni, Judge(), asked, options.seeds, options.judged)
    for wrong in (r for r in found if not r.right):
        print(
            f"{asked_in(wrong.question)!r} ({'heard' if wrong.question.spoken else 'read'}, "
            f"{wrong.speaker}, seed {wrong.seed}): wrote {wrong.text!r}, said {wrong.recognised!r} "
            f"as {set(wrong.voices) or '-'}{'' if wrong.ended else ', did not end'}"
        )
    print(json.dumps(asdict(figures(found)), indent=2))
    for name, share in shares(found).items():
        low, high = share.interval
        print(f"{name}: {share.count} of {share.of}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
