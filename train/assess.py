"""Assess the speaking checkpoint on questions that its training left out.

    python -m train.assess CHECKPOINT

Each question is asked through the package at the released sampling settings, once for each seed, in
each speaker's voice in turn. The judge (train/judge.py) compares the speech with espeak-ng's own
renderings; nothing of ours trained it.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jiwer
from tqdm import tqdm

from qwen3_omni_neuron import Qwen3Omni
from train.espeak import VOICES
from train.judge import Judge
from train.questions import Question, draw_question
from train.speech import MEASURING

MOST_TEXT_TOKENS = 16
MOST_FRAMES = 100


@dataclass(frozen=True)
class Figures:
    """Shares of 1.

    replies_right: replies whose text is right; heard_word_error: word error rate of replies that
    repeat spoken words; spoken_word_error: of the speech against the text; right_voice: spoken
    words in the right voice; ended: replies whose talker ended by itself; unspoken: replies without
    speech among those that were to be text only.
    """

    replies: int
    replies_right: float
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
    """A reply to one question. said: the words that the judge recognised; voices: of each word."""

    question: Question
    speaker: str
    seed: int
    text: str
    recognised: str
    voices: tuple[str, ...]
    ended: bool

    @property
    def text_only(self) -> bool:
        return self.question.reply.startswith("(")

    @property
    def right(self) -> bool:
        """True where text, speech, voice and end are all right."""
        spoken = "" if self.text_only else self.question.reply
        voices = set(self.voices) <= {self.speaker}
        return (
            self.text == self.question.reply and self.recognised == spoken and voices and self.ended
        )


def questions(count: int, seed: int) -> list[Question]:
    """Draw questions that training left out, half of them in speech."""
    rng = random.Random(f"assess {seed}")
    return [
        draw_question(rng, MEASURING, held_out=True, spoken=number % 2 == 0)
        for number in range(count)
    ]


def replies(
    omni: Qwen3Omni, judge: Judge, asked_for: Sequence[Question], seeds: Sequence[int]
) -> list[Reply]:
    """Ask every question once for each seed."""
    turns = [(seed, number) for seed in seeds for number in range(len(asked_for))]
    return [
        reply(omni, judge, asked_for[number], sorted(VOICES)[(number + seed) % 3], seed)
        for seed, number in tqdm(turns, "asked")
    ]


def reply(omni: Qwen3Omni, judge: Judge, question: Question, speaker: str, seed: int) -> Reply:
    """Ask one question, and recognise its speech."""
    result = omni.generate_audio(
        question.messages,
        speaker=speaker,
        seed=seed,
        thinker_max_new_tokens=MOST_TEXT_TOKENS,
        talker_max_new_tokens=MOST_FRAMES,
    )
    heard = judge.hear(result.audio)
    return Reply(
        question,
        speaker,
        seed,
        result.text,
        " ".join(word.word for word in heard),
        tuple(word.speaker for word in heard),
        result.talker_finish_reason == "stop",
    )


def shares(found: Sequence[Reply]) -> dict[str, Share]:
    """Count the cases of each figure; those without a case are left out."""
    aloud = [r for r in found if not r.text_only and r.text]
    again = [r for r in found if r.question.spoken and r.question.prompt.says_again]
    counted = {
        "replies_right": _count([r.text == r.question.reply for r in found]),
        "heard_word_error": _errors([(r.question.reply, r.text) for r in again]),
        "spoken_word_error": _errors([(r.text, r.recognised) for r in aloud]),
        "right_voice": _count([voice == r.speaker for r in aloud for voice in r.voices]),
        "ended": _count([r.ended for r in found]),
        "unspoken": _count([not r.recognised for r in found if r.text_only]),
    }
    return {name: share for name, share in counted.items() if share.of}


def figures(found: Sequence[Reply]) -> Figures:
    """Compute the figures of all replies."""
    return Figures(len(found), **{name: share.value for name, share in shares(found).items()})


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
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    with Qwen3Omni.load(options.checkpoint, dtype=options.dtype, max_concurrency=1) as omni:
        found = replies(omni, Judge(), questions(options.questions, 0), options.seeds)
    for wrong in (r for r in found if not r.right):
        print(
            f"{wrong.question.prompt.words!r} ({'heard' if wrong.question.spoken else 'read'}, "
            f"{wrong.speaker}, seed {wrong.seed}): wrote {wrong.text!r}, said {wrong.recognised!r} "
            f"as {set(wrong.voices) or '-'}{'' if wrong.ended else ', did not end'}"
        )
    print(json.dumps(asdict(figures(found)), indent=2))
    for name, share in shares(found).items():
        low, high = share.interval
        print(f"{name}: {share.count} of {share.of}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
