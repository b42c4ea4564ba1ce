"""Time from the last sample of a user's speech to the first sample of the reply.

    python -m bench.end_of_speech --size small --json end_of_speech.json
    python -m bench.end_of_speech --replay port-167,expected     # no device, no measurement

Speech arrives through `Qwen3Omni.session`, in pieces, at the speed of speech; the clock starts when
the last piece is appended. Turn 1 is the first one of a session; the turns between those that are
measured have 2 s of speech, at once. --others: callers that ask other questions all the while, and
listen to each reply to its end. The rows of reuse "off" are what it takes where speech is given
whole when it has ended, to a model that computes every prompt anew.

--retained: also sessions whose conversation is cut to this fraction of MOST_ROWS rows whenever it
has more (`truncation`): the turns after the cut, which `--turns` must reach, compute more rows.

--replay: the package's runtime over stage latencies on a virtual clock (see bench/replay.py). A
prompt of 1,294 rows, of which all but the last 8 s window of speech and the template's rows after
it are held; 0 held: the whole prompt is prefilled when speech ends. The cost of rows of which a
profile says nothing is stated in testing/replaying/profiles.py, StageProfile.prefill_by_rows_s.
"""

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from bench.common.models import add_size_argument, made_checkpoint
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.events import AudioChunk, Finished
from qwen3_omni_neuron.options import RequestArguments
from qwen3_omni_neuron.session import Session
from testing.command_line import Figures, InputError, Row, natural, parser_of, run, sizes
from testing.headlines import headline
from testing.replaying.cases import OURS, PROFILES
from testing.replaying.device import PLACEMENTS, Behaviour
from testing.replaying.load import RequestLengths
from testing.replaying.profiles import MEAN_PROMPT_ROWS, StageProfile
from testing.replaying.simulation import replay_after_speech

RATE = 16000
SPOKEN = Path(__file__).parents[1] / "examples" / "question.wav"
BETWEEN_S = 2.0
MOST_ROWS = 512  # of a conversation that is cut
OPEN_ROWS = 104 + 7  # one window of speech, and the template's rows after it
REPLAYED = RequestLengths(MEAN_PROMPT_ROWS, MEAN_PROMPT_ROWS - 800, 30.0, 68, 200)
CHUNKED_PREFILL = Behaviour("ours, adaptive", chunked_prefill=True)
LIMITS: RequestArguments = {"thinker_max_new_tokens": 16, "talker_max_new_tokens": 33}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("end_of_speech", __doc__)
    add_size_argument(parser)
    parser.add_argument("--seconds", type=sizes, default="2,5,15,30", help="of the speech")
    parser.add_argument("--piece-ms", type=sizes, default="20,200")
    parser.add_argument("--turns", type=sizes, default="1,2,10", help="which turns are measured")
    parser.add_argument(
        "--others", type=lambda text: [natural(part) for part in text.split(",")], default="0,7"
    )
    parser.add_argument(
        "--retained",
        type=lambda text: [None, *map(float, text.split(","))],
        default=[None],
        metavar="RATIO,...",
    )
    parser.add_argument("--rounds", type=natural, default=3)
    parser.add_argument(
        "--speed", type=float, default=1.0, help="of the speech; pieces come as often as that says"
    )
    parser.add_argument("--replay", metavar="PROFILE,...", help="replay these profiles instead")
    return run("end_of_speech", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure, or replay: a row a case, times in seconds."""
    if options.speed <= 0:
        raise InputError(f"--speed is above 0, got {options.speed}.")
    rows = list(replayed(options) if options.replay else measured(options))
    medians = [row["median_s"] for row in rows]
    name = "end of speech to first sample" + (", simulated" if options.replay else "")
    return rows, {"slowest_s": max(medians)}, [headline(name, medians, "s")]


def replayed(options: argparse.Namespace) -> Iterator[Row]:
    """Replay each profile in each placement, with and without held rows."""
    for name in options.replay.split(","):
        file = PROFILES / f"{name}.json"
        profile = StageProfile.load(file if file.exists() else Path(name))
        for placement in PLACEMENTS:
            for others in options.others:
                for held in (0, MEAN_PROMPT_ROWS - OPEN_ROWS):
                    behaviour = CHUNKED_PREFILL if held else OURS
                    load = [REPLAYED] * 3
                    found = replay_after_speech(profile, behaviour, placement, load, held, others)
                    yield {
                        "kind": "replay",
                        "profile": profile.name,
                        "placement": placement,
                        "others": others,
                        "prompt_rows": MEAN_PROMPT_ROWS,
                        "held_rows": held,
                        **_figures(found),
                    }


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Measure sessions of a made checkpoint, with the prefix cache and without."""
    most = max(options.others) + 2
    with made_checkpoint(options.size) as checkpoint:
        for reuse in (True, False):
            with Qwen3Omni.load(checkpoint, max_concurrency=most, reuse=reuse) as omni:
                for others in options.others:
                    with busy(omni, others, options.speed):
                        # Without it the pieces' times make no difference.
                        pieces = list(options.piece_ms) if reuse else [None]
                        for case in itertools.product(options.seconds, pieces, options.retained):
                            yield from sessions(omni, options, others, *case)


def sessions(
    omni: Qwen3Omni,
    options: argparse.Namespace,
    others: int,
    seconds: int,
    piece_ms: int | None,
    retained: float | None,
) -> Iterator[Row]:
    """Measure the same turns of several sessions.

    piece_ms: None if the speech is sent whole. retained: None if the conversation is not cut.
    """
    found: dict[int, list[tuple[float, int, int]]] = {turn: [] for turn in options.turns}
    for number in range(options.rounds + 1):  # the first one is not counted
        asked: RequestArguments = {**LIMITS, "seed": number}
        if retained is not None:
            asked["truncation"] = {
                "type": "retention_ratio",
                "retention_ratio": retained,
                "token_limits": {"post_instructions": MOST_ROWS},
            }
        with omni.session(**asked) as session:
            for turn in range(1, max(options.turns) + 1):
                counts = turn in found
                samples = speech(seconds if counts else BETWEEN_S, shift=100 * number + turn)
                taken = answer(session, samples, piece_ms if counts else None, options.speed)
                if counts and number:
                    found[turn].append(taken)
    for turn, answers in found.items():
        yield {
            "kind": "measured",
            "reuse": "off" if piece_ms is None else "on",
            "speech_s": seconds,
            "piece_ms": piece_ms,
            "turn": turn,
            "others": others,
            "retained": retained,
            "prompt_rows": answers[-1][1],
            "reused_rows": answers[-1][2],
            **_figures([taken_s for taken_s, _, _ in answers]),
        }


def answer(
    session: Session, samples: NDArray[np.float32], piece_ms: int | None, speed: float
) -> tuple[float, int, int]:
    """Speak a turn and take the reply.

    Returns the seconds from the last sample to the reply's first, the number of the prompt's rows,
    and how many of them were in the prefix cache.
    """
    size = len(samples) if piece_ms is None else RATE * piece_ms // 1000
    start_s = time.perf_counter()
    for first in range(0, len(samples), size):
        piece = samples[first : first + size]
        if piece_ms is not None:  # a piece is sent when its last sample was spoken
            due_s = start_s + (first + len(piece)) / RATE / speed
            time.sleep(max(0.0, due_s - time.perf_counter()))
        ended_s = time.perf_counter()
        session.append_audio(piece, RATE)
    first_sample_s = None
    for event in session.respond():
        if first_sample_s is None and isinstance(event, AudioChunk):
            first_sample_s = time.perf_counter()
    if first_sample_s is None:
        raise InputError("the checkpoint gave a reply without speech: nothing can be timed.")
    assert isinstance(event, Finished), "a stream ends with its result"
    timings = event.result.timings
    return first_sample_s - ended_s, timings.prompt_tokens, timings.reused_tokens


@contextmanager
def busy(omni: Qwen3Omni, callers: int, speed: float) -> Iterator[None]:
    """Let callers ask questions, each one after hearing the reply to its last question."""
    done = threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            question = f"Question {number}: what colour is the sky over the sea?"
            options: RequestArguments = {**LIMITS, "seed": number}
            reply = omni.generate_audio([{"role": "user", "content": question}], **options)
            done.wait(max(0.0, reply.timings.audio_s - reply.timings.total_s) / speed)
            number += callers

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def speech(seconds: float, shift: int) -> NDArray[np.float32]:
    """Return this many seconds of a repeated spoken question, from another place for each shift."""
    samples, rate = soundfile.read(SPOKEN, dtype="float32")
    assert rate == RATE and samples.ndim == 1, "the example is mono, at the model's rate"
    return np.resize(np.roll(samples, 997 * shift), round(RATE * seconds))


def _figures(seconds: Sequence[float]) -> Row:
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
