"""Errors of simple maps from text to time: where in the speech each of its words begins.

    python -m bench.word_times --texts 60 --json word_times.json

Two kinds of speech, in three voices each. "talker": texts of the checkpoint that ships, of 1 to 12
of its words, spoken four words at a time (`say`); a word begins where silence ends, and texts of
which train/judge.py hears other words are left out. "espeak-ng": one and three sentences, connected
as people's speech is; espeak-ng says where each word begins. A row is a map:

- bytes: in proportion to the UTF-8 bytes before the word, over the whole speech.
- bytes of a piece: the same, over each piece that the talker spoke by itself.
- token: the frame at which the word's token entered the talker's input. The constant delay that
  fits best, the median, is added afterwards.
- bytes without pauses: in proportion to the bytes, over the parts of the speech between pauses.
- nearest pause: as "bytes", and moved to the end of the nearest pause of at most NEAR_S away.

p50_s, p90_s: of the absolute errors; within: share of the words whose error is at most CLOSE_S.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.vad import SENTENCES
from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.events import SAMPLE_RATE
from testing.command_line import Figures, Row, parser_of, positive, run
from testing.headlines import headline
from train.codes import FRAME_SAMPLES
from train.espeak import VOICES, speak_words
from train.judge import Judge, word_bounds
from train.vocabulary import MOST_WORDS, SPOKEN

LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # words of a text
CLOSE_S = 0.15
NEAR_S = 0.4


@dataclass(frozen=True)
class Words:
    """Words with their speech.

    samples: float32 at 24 kHz. onsets_s: where each word begins, None where that is not known.
    """

    words: list[str]
    samples: NDArray[np.float32]
    onsets_s: list[float | None]

    @property
    def audio_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE

    @property
    def sounding_s(self) -> list[tuple[float, float]]:
        """Begin and end of the parts between pauses, in seconds."""
        return [(a / SAMPLE_RATE, b / SAMPLE_RATE) for a, b in word_bounds(self.samples)]


Map = Callable[[Words], list[float]]  # to the estimated onset of each word, in seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("word_times", __doc__)
    parser.add_argument("--texts", type=positive, default=60, help="that the checkpoint speaks")
    return run("word_times", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every map: a row for each."""
    pieces = [text for text in spoken_texts(options.texts) if text]
    texts, sentences = [joined(text) for text in pieces], connected()
    alone = [piece for text in pieces for piece in text]
    token = errors(entered, alone)
    rows = [
        _row("talker", "bytes", errors(by_bytes, texts)),
        _row("talker", "bytes of a piece", errors(by_bytes, alone)),
        _row("talker", "token", [error - float(np.median(token)) for error in token]),
        _row("talker", "bytes without pauses", errors(without_pauses, texts)),
        _row("talker", "nearest pause", errors(nearest_pause, texts)),
        _row("espeak-ng", "bytes", errors(by_bytes, sentences)),
        _row("espeak-ng", "bytes without pauses", errors(without_pauses, sentences)),
        _row("espeak-ng", "nearest pause", errors(nearest_pause, sentences)),
    ]
    summary = {"texts": options.texts, "left_out": options.texts - len(texts)}
    headlines = [
        headline(
            f"words within {1e3 * CLOSE_S:g} ms, {speech}",
            [max(row["within"] for row in rows if row["speech"] == speech)],
            "%",
            "goal 90 %",
        )
        for speech in ("talker", "espeak-ng")
    ]
    return rows, summary, headlines


def _row(speech: str, name: str, found: Sequence[float]) -> Row:
    absolute = np.abs(found)
    p50, p90 = np.percentile(absolute, (50, 90))
    row: Row = {"speech": speech, "map": name, "words": len(found)}
    return row | {
        "p50_s": float(p50),
        "p90_s": float(p90),
        "within": float(np.mean(absolute <= CLOSE_S)),
    }


def errors(estimate: Map, speech: Sequence[Words]) -> list[float]:
    """Return the estimate less the true onset, of every word whose onset is known."""
    return [
        guess - true
        for words in speech
        for guess, true in zip(estimate(words), words.onsets_s, strict=True)
        if true is not None
    ]


# Maps


def by_bytes(speech: Words) -> list[float]:
    return spread(speech.words, [(0.0, speech.audio_s)])


def without_pauses(speech: Words) -> list[float]:
    return spread(speech.words, speech.sounding_s)


def entered(speech: Words) -> list[float]:
    """Each word of the checkpoint is a token, of which every frame's input has the next one."""
    return [index * FRAME_SAMPLES / SAMPLE_RATE for index in range(len(speech.words))]


def nearest_pause(speech: Words) -> list[float]:
    ends_s, found = [start_s for start_s, _ in speech.sounding_s], []
    for guess in by_bytes(speech):
        nearest = min(ends_s, key=lambda end_s: abs(end_s - guess))
        found.append(nearest if abs(nearest - guess) <= NEAR_S else guess)
    return found


def spread(words: Sequence[str], spans_s: Sequence[tuple[float, float]]) -> list[float]:
    """Spread words over spans of time, in proportion to their bytes with the spaces between."""
    total = len(" ".join(words).encode())
    pace = sum(end_s - start_s for start_s, end_s in spans_s) / total
    found, before = [], 0
    for word in words:
        after_s = before * pace
        for start_s, end_s in spans_s:
            if after_s < end_s - start_s:
                break
            after_s -= end_s - start_s
        found.append(start_s + after_s)
        before += len(word.encode()) + 1
    return found


# Speech


def spoken_texts(count: int) -> list[list[Words]]:
    """Let the checkpoint speak texts: the pieces of each, none where other words are heard."""
    dice, judge, found = random.Random(0), Judge(), []
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1) as omni:
        for number in range(count):
            words = [dice.choice(SPOKEN) for _ in range(LENGTHS[number % len(LENGTHS)])]
            speaker, pieces = sorted(VOICES)[number % len(VOICES)], list[Words]()
            for first in range(0, len(words), MOST_WORDS):  # as `say` cuts all of them
                piece, seed = words[first : first + MOST_WORDS], number + first // MOST_WORDS
                sound = omni.say(" ".join(piece), speaker=speaker, seed=seed).audio
                if [heard.word for heard in judge.hear(sound)] != piece:
                    pieces = []
                    break
                onsets_s = [start / SAMPLE_RATE for start, _ in word_bounds(sound)]
                pieces.append(Words(piece, sound, [*onsets_s]))
            found.append(pieces)
    return found


def joined(pieces: Sequence[Words]) -> Words:
    """Return pieces that are spoken one after another as one."""
    words, onsets_s, start_s = list[str](), list[float | None](), 0.0
    for piece in pieces:
        words += piece.words
        onsets_s += [None if s is None else start_s + s for s in piece.onsets_s]
        start_s += piece.audio_s
    return Words(words, np.concatenate([piece.samples for piece in pieces]), onsets_s)


def connected() -> list[Words]:
    """Return SENTENCES in every voice, one and three at a time."""
    sentences, found = [" ".join(parts) for parts in SENTENCES], []
    for voice in VOICES.values():
        for index in range(len(sentences)):
            for count in (1, 3):
                text = " ".join((sentences * 2)[index : index + count])
                samples, onsets_s = speak_words(text, voice, SAMPLE_RATE)
                words, at = text.split(), 0
                known = list[float | None]()
                for word in words:
                    known.append(onsets_s.get(at))
                    at += len(word) + 1
                found.append(Words(words, samples, known))
    return found


if __name__ == "__main__":
    sys.exit(main())
