"""Assess the speaking checkpoint on questions that its training left out.

    python -m train.assess CHECKPOINT

Each question is asked through the package at the released sampling settings, once for each seed, in
each speaker's voice in turn. The judge (train/judge.py) compares the speech with espeak-ng's own
renderings; nothing of ours trained it.
"""

import argparse
import json
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


def figures(found: Sequence[Reply]) -> Figures:
    """Compute the figures of all replies."""
    aloud = [r for r in found if not r.text_only and r.text]
    again = [r for r in found if r.question.spoken and r.question.prompt.says_again]
    voices = [voice == r.speaker for r in aloud for voice in r.voices]
    silent = [not r.recognised for r in found if r.text_only]
    return Figures(
        replies=len(found),
        replies_right=_share([r.text == r.question.reply for r in found]),
        heard_word_error=jiwer.wer([r.question.reply for r in again], [r.text for r in again]),
        spoken_word_error=jiwer.wer([r.text for r in aloud], [r.recognised for r in aloud]),
        right_voice=_share(voices),
        ended=_share([r.ended for r in found]),
        unspoken=_share(silent),
    )


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


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


if __name__ == "__main__":
    main()
