"""Turns that the server finds in made speech: found, cut off, false, late.

    python -m bench.vad --turns 200 --json vad.json
    python -m bench.vad --turns 100 --eagerness

Each turn is a sentence of the speaking checkpoint's words, rendered by espeak-ng with speeds and
pitches that training left out, after a pause. A row is a level of pink noise. found: turns with
exactly one start and end; cut_off: turns that were ended before their speech was; false: starts
outside speech. started_ms, ended_ms: from where speech begins to where the server knows it, and
from where it ends to that, silence_duration_ms included; medians and 95th percentiles.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.serving.realtime.session_config import SemanticVad
from qwen3_omni_neuron.serving.realtime.turn_detector import (
    FRAME_SAMPLES,
    RATE,
    Paused,
    SileroVad,
    Started,
    Stopped,
    TurnDetector,
    TurnSettings,
    can_judge,
    is_complete,
)
from testing.command_line import Figures, InputError, Row, parser_of, positive, run
from testing.headlines import headline, of_percentiles
from train.espeak import VOICES, speak
from train.speech import MEASURING, pink_noise
from train.vocabulary import prompts

BELOW_DB = (40, 30, 20, 10, 5)  # noise below speech
PAUSE_S = 1.5
PAUSES_S = 0.4, 1.6  # the shortest and the longest pause inside of a sentence
LONGEST_S = 9.0  # silence after a turn, in which each of them ends
SENTENCES = (
    ("I would like to book a table,", "for four people on Friday evening."),
    ("Could you tell me,", "when the next train to Hamburg leaves?"),
    ("My order number is seven four two,", "nine one five."),
    ("Please remind me,", "to call my mother tomorrow at ten."),
    ("If it rains on Sunday,", "we will stay at home and cook."),
    ("I am looking for a present,", "for a friend who likes gardening."),
    ("The meeting was moved,", "because two of us were ill."),
    ("What I wanted to ask is,", "whether you have this in blue."),
    ("Turn off the lights in the kitchen,", "and the heating in the hall."),
    ("We need three apples, some bread,", "and a bottle of milk."),
)
"""Sentences in two parts, with a pause between them."""
EDGE_MS = 100.0  # of soft speech may be missing without counting as cut off


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("vad", __doc__)
    parser.add_argument("--turns", type=positive, default=200, help="of each level")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--eagerness", action="store_true", help="turns by meaning, not by noise")
    return run("vad", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure: a row for each noise level, or two for each eagerness."""
    if options.eagerness:
        rows = by_eagerness(options.turns)
        cut = [row["cut_off"] / row["turns"] for row in rows if row["by"] == "meaning"]
        return rows, {}, [headline("turns cut off, by meaning", cut, "%")]
    rows = [level(options, below_db) for below_db in BELOW_DB]
    found = sum(row["found"] for row in rows) / sum(row["turns"] for row in rows)
    late = {"p50": rows[0]["ended_ms_p50"] / 1e3, "p95": rows[0]["ended_ms_p95"] / 1e3}
    headlines = [
        headline("turns found", [found], "%"),
        of_percentiles("end of speech to its end known", late, rows[0]["found"], "s"),
    ]
    return rows, {"found_share": found}, headlines


def level(options: argparse.Namespace, below_db: int) -> Row:
    """Measure one noise level: turn by turn, in one stream."""
    dice = random.Random(below_db)
    settings = TurnSettings(options.threshold)
    detector = TurnDetector(settings, SileroVad())
    started_ms, ended_ms = list[float](), list[float]()
    found = cut_off = false = 0
    for _ in range(options.turns):
        (prompt,) = prompts(dice, 1, heard=True, held_out=True)
        voice = VOICES[dice.choice(sorted(VOICES))]
        pitch = voice.pitch + dice.choice(MEASURING.pitches)
        voice = replace(voice, words_per_minute=dice.choice(MEASURING.speeds), pitch=pitch)
        clip = 0.5 * speak(prompt.words, voice, RATE)
        pause = np.zeros(round(PAUSE_S * RATE), np.float32)
        samples = np.concatenate((pause, clip, pause))
        loud = float(np.sqrt(np.mean(clip**2))) * 10 ** (-below_db / 20)
        samples = (samples + loud * pink_noise(len(samples), dice)).astype(np.float32)
        first, last = detector.at + len(pause), detector.at + len(pause) + len(clip)
        starts, stops = list[int](), list[int]()
        for at in range(0, len(samples), FRAME_SAMPLES):
            for outcome in detector.push(samples[at : at + FRAME_SAMPLES]):
                if isinstance(outcome, Started):
                    starts.append(detector.at)
                elif isinstance(outcome, Stopped):
                    stops.append(outcome.at)
        early = last - round(EDGE_MS * RATE / 1000) + settings.silence_duration_ms * RATE // 1000
        cut_off += any(stop < early for stop in stops)
        false += sum(not first - FRAME_SAMPLES <= start <= last for start in starts)
        if len(starts) == len(stops) == 1:
            found += 1
            started_ms.append((starts[0] - first) * 1000 / RATE)
            ended_ms.append((stops[0] - last) * 1000 / RATE)
    row: Row = {"below_db": below_db, "turns": options.turns, "found": found}
    row |= {"cut_off": cut_off, "false": false}
    return row | quantiles("started_ms", started_ms) | quantiles("ended_ms", ended_ms)


def quantiles(name: str, values: Sequence[float]) -> Row:
    """Return the median and the 95th percentile of values."""
    p50, p95 = np.percentile(values or [0], (50, 95))
    return {f"{name}_p50": float(p50), f"{name}_p95": float(p95)}


def by_eagerness(turns: int) -> list[Row]:
    """Measure the ends of the same turns with every eagerness, by meaning and by silence."""
    if not can_judge():
        raise InputError("Smart Turn is missing: pip install '.[smart-turn]'.")
    made, rows = [interrupted_sentence(random.Random(n)) for n in range(turns)], list[Row]()
    judge = lru_cache(maxsize=None)(lambda heard: is_complete(np.frombuffer(heard, np.float32)))
    for eagerness in ("low", "medium", "high"):
        detection = SemanticVad.model_validate({"type": "semantic_vad", "eagerness": eagerness})
        for name, settings in (
            ("meaning", detection.turns),
            ("silence", detection.by_silence.turns),
        ):
            ends = [(end_of(clip, settings, judge) - len(clip)) * 1000 / RATE for clip in made]
            late = [end_ms for end_ms in ends if end_ms > 0]
            row: Row = {"eagerness": eagerness, "by": name, "turns": turns}
            row |= {"cut_off": turns - len(late)}
            rows.append(row | quantiles("ended_ms", late))
    return rows


def interrupted_sentence(dice: random.Random) -> NDArray[np.float32]:
    """Speak a sentence with a pause inside: float32 [samples] at RATE, to the end of the speech."""
    voice = VOICES[dice.choice(sorted(VOICES))]
    voice = replace(voice, words_per_minute=dice.choice(MEASURING.speeds))
    first, second = (speak(part, voice, RATE) for part in dice.choice(SENTENCES))
    pause = np.zeros(round(dice.uniform(*PAUSES_S) * RATE), np.float32)
    clip = np.concatenate((first, pause, second))
    return (0.5 * clip + 1e-3 * pink_noise(len(clip), dice)).astype(np.float32)


def end_of(
    clip: NDArray[np.float32], settings: TurnSettings, judge: Callable[[bytes], bool]
) -> int:
    """Return the sample at which the first turn ends. judge: by the turn's last samples."""
    detector = TurnDetector(settings, SileroVad())
    samples = np.concatenate((clip, np.zeros(round(LONGEST_S * RATE), np.float32)))
    for at in range(0, len(samples), FRAME_SAMPLES):
        found = detector.push(samples[at : at + FRAME_SAMPLES])
        heard = found[-1].heard if found and isinstance(found[-1], Paused) else None
        if heard is not None:
            found = detector.judged(judge(heard.tobytes()))
        if found and isinstance(found[-1], Stopped):
            return found[-1].at
    raise InputError(f"a turn of {len(clip) / RATE:.1f} s was not found, or did not end.")


if __name__ == "__main__":
    sys.exit(main())
