"""Turns that Silero's model finds in held-out renderings, in noise: found, cut off, false, late.

    python -m bench.vad --turns 200 --json vad.json

Each turn is a sentence of the speaking checkpoint's words, rendered by espeak-ng with speeds and
pitches that training left out, after a pause. A row is a level of pink noise. found: turns with
exactly one start and end; cut_off: turns that were ended before their speech was; false: starts
outside speech. started_ms, ended_ms: from where speech begins to where the server knows it, and
from where it ends to that, silence_duration_ms included; medians and 95th percentiles.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.common.command_line import Figures, Row, parser_of, positive, run
from qwen3_omni_neuron.serving.realtime.turns import Started, Stopped, TurnDetector, TurnSettings
from qwen3_omni_neuron.serving.realtime.vad import FRAME_SAMPLES, RATE, SileroVad
from train.espeak import VOICES, speak
from train.speech import MEASURING, pink_noise
from train.vocabulary import prompts

BELOW_DB = (40, 30, 20, 10, 5)  # noise below speech
PAUSE_S = 1.5
EDGE_MS = 100.0  # of soft speech may be missing without counting as cut off


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("vad", __doc__)
    parser.add_argument("--turns", type=positive, default=200, help="of each level")
    parser.add_argument("--threshold", type=float, default=0.5)
    return run("vad", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure: a row for each noise level."""
    rows = [level(options, below_db) for below_db in BELOW_DB]
    found = sum(row["found"] for row in rows) / sum(row["turns"] for row in rows)
    return rows, {"found_share": found}


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
    for name, values in (("started_ms", started_ms), ("ended_ms", ended_ms)):
        row[f"{name}_p50"], row[f"{name}_p95"] = map(float, np.percentile(values or [0], (50, 95)))
    return row


if __name__ == "__main__":
    sys.exit(main())
