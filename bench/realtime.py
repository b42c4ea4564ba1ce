"""End of speech to the first sample of the answer over /v1/realtime, beside the same in process.

    python -m bench.realtime --sessions 1,4,8 --json realtime.json

Each session speaks a question in pieces, each sent when its last sample was spoken; the clock
starts when the last one of speech is sent. Four ways, in turn: "api", `Qwen3Omni.session` in this
process; "commit", over the socket with input_audio_buffer.commit and response.create right behind
the last piece; "vad", with server_vad, for which silence goes on; and "transcript", a session that
only transcribes: from the commit of TRANSCRIBED_S of speech, of which nothing can be transcribed
before, to the whole transcript. A row is a way and a number of sessions at once; added_s is what
the socket adds to the median. The method is that of vllm-omni's own figures (419 ms with a commit,
1035 ms with server VAD, on other hardware).

    python -m bench.realtime --url wss://api.openai.com/v1/realtime --model gpt-realtime --turns 10

judges any server of OpenAI's Realtime API by its documented events alone; the key is --key, or
OPENAI_API_KEY, and SSL_CERT_FILE names an authority of one's own. One session; its microphone never
stops, and a player plays each answer as it comes. A row is a turn, of three kinds: "question";
"pause", a sentence with a pause of pause_ms in it; "interruption", a question that is spoken as
soon as the answer to a longer one is heard.

- first_sample_s, first_word_s: end of speech to the answer's first sample, and to the first words
  of its transcript; null if none came within 30 s.
- cut_off: an answer was begun before the end of the sentence.
- silence_s: from the interruption's first sample to the player's silence. The player drops what it
  has at input_audio_buffer.speech_started, and plays what still comes of that answer.
- silenced: false if that answer was played to its end, or the server made it whole while it knew of
  the speech; silence_s and silenced are null if it was too short to tell (1 s or less was left).
- underruns, silent_s: how often a player that starts at the first sample had to wait, and how long.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from bench.common.call import CALL_RATE, Answer, Call
from bench.common.models import add_model_arguments, chosen_checkpoint, load_chosen
from bench.end_of_speech import LIMITS, RATE
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.events import AudioChunk
from qwen3_omni_neuron.options import RequestArguments
from testing.command_line import (
    Figures,
    InputError,
    Row,
    add_endpoint_arguments,
    parser_of,
    positive,
    run,
    sizes,
)
from testing.headlines import headline, of_percentiles
from testing.metrics import percentiles, playback
from testing.server_process import SLOTS, server_process
from testing.websocket_client import opened, send
from train.espeak import VOICES, speak, trimmed

SPOKEN = Path(__file__).parents[1] / "examples" / "sum.wav"
SENTENCE = ("what is six", "plus two")  # a pause comes between them
LONG = "say seven red goodbye white"
MESSAGE_BYTES = 1 << 24  # of one event of another server
ANSWER_S = 30.0  # in which an answer comes, from its question's end
PLAYED_S = 120.0  # in which it has been played
TRANSCRIBED_S = 8.9  # two windows, and none that is complete before the turn ends
GAP_S = 0.5  # of silence before the next question
TELLING_S = 1.0  # of an answer were left when it was interrupted: else it says nothing

# By way, the field of its time.
FIGURE = dict.fromkeys(("api", "commit", "vad"), "first_sample_s")
FIGURE["transcript"] = "transcribed_s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("realtime", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--sessions", type=sizes, default=[1, 4, 8], metavar="N,N,...")
    parser.add_argument("--turns", type=positive, default=5, help="of each session; default: 5")
    parser.add_argument("--piece-ms", type=positive, default=100)
    parser.add_argument(
        "--question", default=str(SPOKEN), help="a sound file; default: the example"
    )
    add_endpoint_arguments(parser, "judge this endpoint (ws: or wss:) and nothing else")
    parser.add_argument("--pauses-ms", type=sizes, default=[300, 600, 1000], metavar="N,N,...")
    parser.add_argument("--detection", default="server_vad", help="or semantic_vad, with --url")
    return run("realtime", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure each way at each number of sessions, or judge another server."""
    samples, rate = soundfile.read(options.question, dtype="float32")
    if rate != RATE or samples.ndim != 1:
        raise InputError(f"{options.question} is not mono of {RATE} Hz.")
    if options.url:
        with called(options) as call:
            return judge(call, samples, options)
    rows: list[Row] = []
    with (
        chosen_checkpoint(options) as checkpoint,
        load_chosen(checkpoint, options, SLOTS, reuse=True) as omni,
        server_process(checkpoint, options) as (url, _),
    ):
        ways: dict[str, Callable[[int], list[float]]] = {
            "api": lambda number: in_process(omni, samples, number, options),
            "commit": lambda number: over_socket(url, samples, number, options, vad=False),
            "vad": lambda number: over_socket(url, samples, number, options, vad=True),
            "transcript": lambda number: transcribed(url, samples, options),
        }
        for sessions in options.sessions:
            for way, talk in ways.items():
                with ThreadPoolExecutor(sessions) as pool:
                    found = [s for part in pool.map(talk, range(sessions)) for s in part]
                quantiles = percentiles(found)
                rows.append({"way": way, "sessions": sessions, "turns": len(found)})
                rows[-1] |= {FIGURE[way]: quantiles}
    medians = {
        (row["way"], row["sessions"]): row["first_sample_s"]["p50"]
        for row in rows
        if "first_sample_s" in row
    }
    added = {str(n): medians["commit", n] - medians["api", n] for n in options.sessions}
    first = [row for row in rows if row["sessions"] == options.sessions[0]]
    names = {"vad": "end of speech to first sample", "commit": "the same, turn ended by the client"}
    names["transcript"] = "end of speech to transcript"
    headlines = [
        of_percentiles(names[row["way"]], row.get(FIGURE[row["way"]]), row["turns"], "s")
        for row in first
        if row["way"] in names
    ]
    return rows, {"added_s": added}, headlines


def pieces(samples: Any, piece_ms: int) -> Any:
    """Yield a question's pieces, each at the time when its last sample has been spoken."""
    size, start_s = RATE * piece_ms // 1000, time.perf_counter()
    for first in range(0, len(samples), size):
        piece = samples[first : first + size]
        due_s = start_s + (first + len(piece)) / RATE
        time.sleep(max(0.0, due_s - time.perf_counter()))
        yield piece


def in_process(
    omni: Qwen3Omni, samples: Any, number: int, options: argparse.Namespace
) -> list[float]:
    """Speak the turns of one session in this process; the first one is not counted."""
    found = []
    asked: RequestArguments = {**LIMITS, "seed": number, "literal_text": True}
    with omni.session(**asked) as session:
        for turn in range(options.turns + 1):
            ended_s = first_s = 0.0
            for piece in pieces(np.roll(samples, 997 * (turn + 10 * number)), options.piece_ms):
                ended_s = time.perf_counter()
                session.append_audio(piece, RATE)
            for event in session.respond():
                if isinstance(event, AudioChunk) and not first_s:
                    first_s = time.perf_counter()
            found.append(first_s - ended_s)
    return found[1:]


def over_socket(
    url: str, samples: Any, number: int, options: argparse.Namespace, vad: bool
) -> list[float]:
    """Speak the turns of one session over a socket; the first one is not counted."""
    found = []
    detection = {"type": "server_vad"} if vad else None
    sound = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": detection}
    with opened(url) as socket:
        call = Call(socket, RATE, options.piece_ms)
        call.configure(audio={"input": sound}, seed=number, **LIMITS)
        for turn in range(options.turns + 1):
            # A rolled question would begin and end in mid-word, which is no turn for a VAD.
            said = samples if vad else np.roll(samples, 997 * (turn + 10 * number))
            began_s, ended_s = call.spoken_s, call.speak(said)
            if not vad:
                call.ask()
            answer = answer_after(call, began_s, silence=vad)
            if answer is None or not answer.chunks:
                raise InputError(f"no spoken answer came within {ANSWER_S:.0f} s.")
            found.append(answer.chunks[0].at_s - ended_s)
    return found[1:]


def transcribed(url: str, samples: Any, options: argparse.Namespace) -> list[float]:
    """Speak the turns of a session that only transcribes; the first one is not counted."""
    found: list[float] = []
    said = np.resize(samples, round(TRANSCRIBED_S * RATE))
    sound = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": None}
    with opened(url, path="/v1/realtime?intent=transcription") as socket:
        call = Call(socket, RATE, options.piece_ms)
        call.configure(type="transcription", audio={"input": sound})
        while len(found) <= options.turns:
            ended_s = call.speak(said)
            send(socket, "input_audio_buffer.commit")
            done = call.wait(lambda: len(call.transcribed_s) > len(found), ANSWER_S, silence=False)
            if not done:
                raise InputError(f"no transcript came within {ANSWER_S:.0f} s.")
            found.append(call.transcribed_s[-1] - ended_s)
    return found[1:]


def answer_after(call: Call, at_s: float, silence: bool = True) -> Answer | None:
    """Wait for the answer that is begun after a time, and made whole. None: it did not come."""
    call.wait(lambda: call.answer_after(at_s) is not None, ANSWER_S, silence)
    return call.answer_after(at_s)


@contextmanager
def called(options: argparse.Namespace) -> Iterator[Call]:
    """Call the endpoint of the command line, whose certificate is checked."""
    model = f"?{urlencode({'model': options.model})}" if options.model else ""
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    try:
        with connect(
            options.url + model, additional_headers=headers, max_size=MESSAGE_BYTES
        ) as socket:
            yield Call(socket, piece_ms=options.piece_ms)
    except WebSocketException as error:
        raise InputError(f"{options.url}: {error}") from error


def judge(call: Call, samples: NDArray[np.float32], options: argparse.Namespace) -> Figures:
    """Speak all kinds of turns in one call."""
    form, voice = {"type": "audio/pcm", "rate": CALL_RATE}, VOICES["ethan"]
    question = trimmed(soxr.resample(samples, RATE, CALL_RATE))
    if not len(question):
        raise InputError(f"{options.question} holds no speech.")
    sentence = [speak(words, voice, CALL_RATE) for words in SENTENCE]
    long = speak(LONG, voice, CALL_RATE)
    detection = {"type": options.detection}
    sound = {"input": {"format": form, "turn_detection": detection}, "output": {"format": form}}
    call.configure(output_modalities=["audio"], audio=sound)
    rows: list[Row] = []
    for turn in range(options.turns):
        rows.append({"kind": "question", "turn": turn, **spoken_turn(call, [question])})
        for pause_ms in options.pauses_ms:
            rows.append({"kind": "pause", "turn": turn, "pause_ms": pause_ms})
            rows[-1] |= spoken_turn(call, sentence, pause_ms)
        rows.append({"kind": "interruption", "turn": turn, **interruption(call, long, question)})
    headlines = [
        headline(name, [row.get(field) for row in rows], "s")
        for name, field in (
            ("end of speech to first sample", "first_sample_s"),
            ("end of speech to first word", "first_word_s"),
            ("interruption to silence", "silence_s"),
        )
    ]
    return rows, verdict(rows), headlines


def spoken_turn(call: Call, parts: Sequence[NDArray[np.float32]], pause_ms: int = 0) -> Row:
    """Speak a turn, with pauses between its parts, and listen to its answer."""
    first, ended_s = len(call.answers), 0.0
    pause = np.zeros(CALL_RATE * pause_ms // 1000, np.float32)
    for number, part in enumerate(parts):
        if number:
            call.speak(pause)
        ended_s = call.speak(part)
    answer = answer_after(call, ended_s)

    def over() -> bool:
        ends = [played.silent_from_s for played in call.answers]
        return call.spoken_s >= max(ends, default=0.0) + GAP_S

    call.wait(over, PLAYED_S)
    heard = call.answers[first:]
    return {
        "first_sample_s": answer.chunks[0].at_s - ended_s if answer and answer.chunks else None,
        "first_word_s": answer.words_s - ended_s if answer and answer.words_s else None,
        "cut_off": any(played.created_s < ended_s for played in heard),
        **waits(heard),
    }


def interruption(call: Call, long: NDArray[np.float32], question: NDArray[np.float32]) -> Row:
    """Interrupt the answer to a turn by a question. first_sample_s and so on are that one's."""
    first = len(call.answers)
    call.speak(long)
    call.wait(lambda: any(answer.chunks for answer in call.answers[first:]), ANSWER_S)
    began_s, answers = call.spoken_s, call.answers[first:]
    row = spoken_turn(call, [question])
    row |= {"silence_s": None, "silenced": None}
    spoken = [answer for answer in answers if answer.chunks]
    if not spoken:
        return row
    cut = spoken[-1]
    silenced = cut.stopped_s is not None and not (cut.late and cut.status != "cancelled")
    if silenced or cut.played_until_s > began_s + TELLING_S:
        row |= {"silence_s": cut.silent_from_s - began_s, "silenced": silenced}
    more = waits(answers)
    return row | {name: row[name] + value for name, value in more.items()}


def waits(answers: Sequence[Answer]) -> Row:
    """Count the underruns of answers, as far as the player plays them."""
    found = [playback([c for c in a.chunks if c not in a.late], CALL_RATE) for a in answers]
    return {"underruns": sum(n for n, _ in found), "silent_s": sum(s for _, s in found)}


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Sum the rows up. cut_offs: by pause_ms; 0 are the turns without a pause."""

    def values(name: str) -> list[Any]:
        return [row[name] for row in rows if row.get(name) is not None]

    cut_offs: dict[str, int] = {}
    for row in rows:
        pause_ms = str(row.get("pause_ms", 0))
        cut_offs[pause_ms] = cut_offs.get(pause_ms, 0) + row["cut_off"]
    return {
        **{name: percentiles(values(name)) for name in ("first_sample_s", "first_word_s")},
        "cut_offs": cut_offs,
        "silence_s": percentiles(values("silence_s")),
        "interruptions": len(values("silenced")),
        "not_silenced": values("silenced").count(False),
        "underruns": sum(values("underruns")),
        "silent_s": sum(values("silent_s")),
        "unanswered": sum(row["first_sample_s"] is None for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
