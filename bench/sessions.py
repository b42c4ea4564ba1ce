"""Two figures of sessions: features that a later, louder moment changes, and words that were heard.

    python -m bench.sessions --json result.json

Features of a window of speech are computed when it is complete, and change where a later moment is
so loud that parts of the window are more than 80 dB below it: counted over half minutes of
espeak-ng's sentences, with pink noise and changes of gain. A reply that is cut is cut in its text,
too (`Session.heard`): over replies of the checkpoint that speaks, the words that were heard are
counted by the silence between them, and compared with the words that stay.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, AudioChunk, Qwen3Omni, SpeechResult, TextDelta
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.checkpoint.json_files import read_preprocessor
from qwen3_omni_neuron.events import Event, Finished
from qwen3_omni_neuron.prompt.media.log_mel import GrowingClip, MelSettings
from qwen3_omni_neuron.prompt.turns import BYTES_PER_S, Reply, mean_pace
from testing.command_line import Figures, Row, parser_of, run
from testing.headlines import headline
from train.assess import questions
from train.espeak import VOICES, speak
from train.judge import word_bounds
from train.speech import pink_noise
from train.vocabulary import SPOKEN, unknown_words

RATE = 16000
PIECE = 320  # samples: 20 ms
WINDOW_FRAMES = 800
SHORTEST_S = 9.0  # a clip has at least one whole window
NOISES_DB = (None, 60, 40, 20)  # below the speech; None: digital silence between the sentences
GAINS = ("even", "random by 12 dB", "rising by 3 dB a sentence")
FRAME_SAMPLES = 1920
CLIPS, REPLIES = 20, 100  # clips of each kind, and replies that are cut
EARLIER = 3  # replies of a session before a reply that is cut
CUTS = 20  # for each reply


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("sessions", __doc__)
    parser.add_argument("--seconds", type=float, default=33.0, help="of the longest clip")
    return run("sessions", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Count both: a row for each kind of clip, and a row for each pace."""
    rows: list[Row] = [
        changed_windows(noise_db, gain, CLIPS, options.seconds)
        for noise_db in NOISES_DB
        for gain in GAINS
    ]
    rows += words_kept(REPLIES)
    noisy = [row for row in rows if row.get("noise_db") is not None]
    summary = {
        "windows_changed": share(rows, "changed", "windows"),
        "windows_changed_with_noise": share(noisy, "changed", "windows"),
        "clips_late": share(rows, "late", "clips"),
        "clips_stale": share(rows, "stale", "clips"),
        "cuts_at_the_word": share(rows[:-1], "right", "cuts"),
    }
    headlines = [
        headline("windows that change later", [summary["windows_changed"]], "%"),
        headline("cuts at the right word", [summary["cuts_at_the_word"]], "%"),
    ]
    return rows, summary, headlines


def share(rows: Sequence[Row], part: str, whole: str) -> float:
    """Return the quotient of two columns' sums."""
    counted = [row for row in rows if whole in row]
    return sum(row[part] for row in counted) / sum(row[whole] for row in counted)


def changed_windows(noise_db: int | None, gain: str, clips: int, seconds: float) -> Row:
    """Count the windows whose features at the clip's end differ from those when it was complete.

    late: clips whose loudest moment comes after their last whole window; stale: clips where it
    comes after the last block before the end, so that no work ahead of the end can use it.
    """
    settings = MelSettings.of(read_preprocessor(resolve_checkpoint(SPEAKING_CHECKPOINT)))
    windows = changed = late = stale = 0
    for number in range(clips):
        rng = random.Random(f"{noise_db} {gain} {number}")
        samples = sentences(rng, noise_db, gain, rng.uniform(SHORTEST_S, seconds))
        clip = GrowingClip(RATE, settings, "clip")
        early: list[Tensor] = []
        for start in range(0, len(samples), PIECE):
            clip.push(samples[start : start + PIECE], RATE)
            if clip.complete_frames(WINDOW_FRAMES) > len(early) * WINDOW_FRAMES:
                whole = clip.complete_mel(WINDOW_FRAMES)
                early.append(whole[:, -WINDOW_FRAMES:])
        before_end = clip.complete_mel(WINDOW_FRAMES)
        clip.end()
        final = clip.mel(0).split(WINDOW_FRAMES, 1)
        frames = before_end.shape[1]
        late += not torch.equal(whole, clip.mel(0)[:, :frames])
        stale += not torch.equal(before_end, clip.mel(0)[:, :frames])
        windows += len(early)
        changed += sum(not torch.equal(a, b) for a, b in zip(early, final, strict=False))
    counts = {"windows": windows, "changed": changed, "clips": clips, "late": late, "stale": stale}
    return {"noise_db": noise_db, "gain": gain, **counts}


def sentences(
    rng: random.Random, noise_db: int | None, gain: str, seconds: float
) -> NDArray[np.float32]:
    """Return sentences of random words, with pauses, float32 [samples] at 16 kHz."""
    voice, level_db = VOICES[rng.choice(sorted(VOICES))], -24.0
    some = (*SPOKEN, *unknown_words(held_out=False)[:36])
    parts: list[NDArray[np.float32]] = []
    while sum(map(len, parts)) < seconds * RATE:
        words = " ".join(rng.choice(some) for _ in range(rng.randrange(3, 9)))
        if gain != "even":
            level_db = rng.uniform(-24, -12) if gain.startswith("random") else level_db + 3
        parts.append(speak(words, voice, RATE) * np.float32(10 ** (level_db / 20)))
        parts.append(np.zeros(round(RATE * rng.uniform(0.2, 1.0)), np.float32))
    samples = np.concatenate(parts)[: round(seconds * RATE)]
    if noise_db is not None:
        level = 10 ** (-noise_db / 20) * float(np.sqrt(np.mean(samples**2)))
        samples += np.float32(level) * pink_noise(len(samples), rng)
    return samples


def words_kept(replies: int) -> list[Row]:
    """Compare words heard with words kept, for whole and for stopped replies."""
    said: list[tuple[list[Event], SpeechResult]] = []
    limits: dict[str, Any] = {"thinker_max_new_tokens": 16, "talker_max_new_tokens": 100}
    with Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni:
        for number, question in enumerate(questions(replies, seed=5)):
            events = list(omni.stream(question.messages, seed=number, **limits))
            assert isinstance(events[-1], Finished)
            result = events[-1].result
            # In this checkpoint a word is a token.
            if len(result.audio) and len(word_bounds(result.audio)) == len(result.text.split()):
                said.append((events, result))
    paces = ("its own", "session", "usual", "a token a frame")
    off: dict[str, Counter[int]] = {pace: Counter() for pace in paces}
    rng = random.Random(0)
    for index, (events, result) in enumerate(said):
        earlier = [whole_reply(said[index - back][0]) for back in range(1, EARLIER + 1)]
        for _ in range(CUTS):
            heard = rng.randrange(len(result.audio) + 1)
            words = sum((a + b) / 2 <= heard for a, b in word_bounds(result.audio))
            whole = whole_reply(events)
            whole.heard_s = heard / result.sample_rate
            kept = {"its own": whole}
            for pace, per_s in (("session", mean_pace(earlier)), ("usual", BYTES_PER_S)):
                kept[pace] = stopped_reply(events, heard, per_s)
            for pace, reply in kept.items():
                off[pace][len(reply.text.split()) - words] += 1
            fed = min(len(result.text.split()), heard // FRAME_SAMPLES + 1)
            off["a token a frame"][fed - words] += 1
    return [
        {
            "pace": pace,
            "cuts": found.total(),
            "right": found[0],
            "one_word_more": found[1],
            "one_word_less": found[-1],
            "most_words_more": max(found),
        }
        for pace, found in off.items()
    ]


def whole_reply(events: Sequence[Event]) -> Reply:
    """Return a reply that was played to its end."""
    reply = Reply(True, BYTES_PER_S)
    for event in events:
        reply.add(event)
    return reply


def stopped_reply(events: Sequence[Event], samples: int, bytes_per_s: float) -> Reply:
    """Return a reply with all of its text, but only this many samples played."""
    reply = Reply(True, bytes_per_s)
    for event in events:
        if isinstance(event, TextDelta):
            reply.add(event)
    reply.add(AudioChunk(np.zeros(samples, np.float32), 0, 0))
    reply.ended = True
    return reply


if __name__ == "__main__":
    sys.exit(main())
