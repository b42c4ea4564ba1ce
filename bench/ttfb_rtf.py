"""Time to first sample, and real-time factor, of conversations with so many at a time.

    python -m bench.ttfb_rtf --model CHECKPOINT --requests 100 --concurrency 4 --json result.json
    python -m bench.ttfb_rtf conversations.jsonl --chunk-frames 1,2,4 --save-audio wavs/

Asks the conversations of a manifest (see conversations.py), from the first again after the last,
each with a seed of its own; --concurrency callers ask one after the other each. Definitions are in
metrics.py. A request that fails counts in no figure, and has its error in its row.

A row is one request: what it was asked with (conversation, seed, and the settings of the file),
its figures, what it said (text, and a digest of its codes), its chunks, and for the first
--timeline requests the engines' calls for it. Times in seconds since its arrival; preprocessing_s:
until its conversation had been read; admitted_s: until it had a slot.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.arguments import natural, positive, sizes
from bench.common.conversations import SHIPPED, Conversation, read_conversations
from bench.common.json_lines import ManifestError
from bench.common.metrics import RequestMetrics, request_metrics, summarize
from bench.common.model_choice import add_model_arguments, chosen_checkpoint, load_chosen
from bench.common.observed import Observed, observe
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3Omni, Qwen3OmniError, SpeechResult
from qwen3_omni_neuron.cli.wav import WavFile
from qwen3_omni_neuron.options import RequestOptions
from testing.traced_engines import Recorder

WARM_UP_TOKENS, WARM_UP_FRAMES = 8, 16


@dataclass(frozen=True)
class Answered:
    """A request and what became of it: an observation, or an error."""

    number: int
    conversation: Conversation
    seed: int
    observed: Observed | None
    error: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing could be measured."""
    options = _parser().parse_args(arguments)
    try:
        conversations = read_conversations(options.manifest)
        if options.save_audio:
            options.save_audio.mkdir(parents=True, exist_ok=True)
        with chosen_checkpoint(options) as checkpoint:
            rows, summary = measure(checkpoint, conversations, options)
    except (ManifestError, Qwen3OmniError, OSError) as error:
        print(f"ttfb_rtf.py: {error}", file=sys.stderr)
        return 1
    publish(results_of("ttfb_rtf", arguments, options, rows, summary), options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "manifest", type=Path, nargs="?", default=SHIPPED, help="default: the one that ships"
    )
    add_model_arguments(parser)
    parser.add_argument("--requests", type=positive, help="default: one a conversation")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at a time")
    parser.add_argument("--warm-up", type=natural, default=2, help="requests before, not counted")
    parser.add_argument("--seed", type=natural, default=0, help="of the first; one more for each")
    parser.add_argument("--speaker", default=RequestOptions.speaker)
    parser.add_argument(
        "--thinker-max-new-tokens", type=positive, default=RequestOptions.thinker_max_new_tokens
    )
    parser.add_argument(
        "--talker-max-new-tokens", type=positive, default=RequestOptions.talker_max_new_tokens
    )
    parser.add_argument(
        "--chunk-frames", type=sizes, metavar="N,N,...", help="of the first chunks, the last of "
        "them for all that follow; default: adaptive"
    )  # fmt: skip
    parser.add_argument(
        "--timeline", type=natural, default=0, metavar="N",
        help="note the engines' calls for the first N requests; all engines are watched then"
    )  # fmt: skip
    parser.add_argument("--save-audio", type=Path, metavar="DIR", help="a WAV file a request")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    return parser


def measure(
    checkpoint: str | Path, conversations: Sequence[Conversation], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask them all. Returns the rows, in the order of the requests, and the summary."""
    count = options.requests or len(conversations)
    recorder = Recorder() if options.timeline else None
    wrap = recorder.wrap if recorder else None
    asked = {
        "speaker": options.speaker,
        "thinker_max_new_tokens": options.thinker_max_new_tokens,
        "talker_max_new_tokens": options.talker_max_new_tokens,
        "chunk_frames": options.chunk_frames,
    }
    with load_chosen(checkpoint, options, options.concurrency, wrap) as omni:
        warm_up(omni, conversations, options.warm_up, asked)

        def ask(number: int) -> Answered:
            conversation = conversations[number % len(conversations)]
            seed = options.seed + number
            try:
                observed = observe(omni, conversation.messages, {**asked, "seed": seed})
            except Qwen3OmniError as error:
                return Answered(number, conversation, seed, None, str(error))
            answered = Answered(number, conversation, seed, observed, None)
            if options.save_audio:
                save(options.save_audio / name_of(answered), observed.result)
            return answered

        start_s = time.perf_counter()
        with ThreadPoolExecutor(options.concurrency, "caller") as callers:
            answers = list(callers.map(ask, range(count)))
        wall_s = time.perf_counter() - start_s
    figures = {a.number: request_metrics(a.observed.events) for a in answers if a.observed}
    rows = [row_of(answer, figures.get(answer.number), options, recorder) for answer in answers]
    audio_s = sum(f.audio_s for f in figures.values())
    summary = {
        "failed_requests": sum(answer.error is not None for answer in answers),
        "wall_s": wall_s,
        "audio_s": audio_s,
        "audio_s_per_s": audio_s / wall_s,
        "requests_per_s": len(figures) / wall_s,
        **summarize(list(figures.values())),
    }
    return rows, summary


def warm_up(
    omni: Qwen3Omni, conversations: Sequence[Conversation], count: int, asked: dict[str, Any]
) -> None:
    """Short replies, which nobody counts. Raises what a request does: the others would, too."""
    limits = {
        "thinker_max_new_tokens": min(WARM_UP_TOKENS, asked["thinker_max_new_tokens"]),
        "talker_max_new_tokens": min(WARM_UP_FRAMES, asked["talker_max_new_tokens"]),
    }
    for number in range(count):
        messages = conversations[number % len(conversations)].messages
        observe(omni, messages, {**asked, **limits, "seed": 0})


def row_of(
    answer: Answered,
    figures: RequestMetrics | None,
    options: argparse.Namespace,
    recorder: Recorder | None,
) -> dict[str, Any]:
    """See the top of this file."""
    row = {
        "request": answer.number,
        "conversation": answer.conversation.name,
        "seed": answer.seed,
        "error": answer.error,
    }
    if answer.observed is None or figures is None:
        return row
    observed, result = answer.observed, answer.observed.result
    row |= {
        **asdict(figures),
        "preprocessing_s": observed.submitted_s - observed.events.arrived_s,
        "admitted_s": result.timings.queued_s,
        "prompt_tokens": result.timings.prompt_tokens,
        "text": result.text,
        "codes_sha256": hashlib.sha256(result.codes.astype("<i8").tobytes()).hexdigest(),
        "audio_file": name_of(answer) if options.save_audio else None,
        "chunks": chunks_of(observed),
    }
    if recorder and answer.number < options.timeline:
        row["timeline"] = timeline_of(observed, recorder)
    return row


def chunks_of(observed: Observed) -> list[dict[str, Any]]:
    """Each chunk: when it came, since the request's arrival, and where it lies in the audio."""
    chunks, first_sample = observed.events.chunks, 0
    rows = []
    for chunk in chunks:
        rows.append(
            {
                "arrival_s": chunk.at_s - observed.events.arrived_s,
                "first_sample": first_sample,
                "samples": chunk.samples,
                "frames": chunk.frames,
            }
        )
        first_sample += chunk.samples
    return rows


def timeline_of(observed: Observed, recorder: Recorder) -> list[dict[str, Any]]:
    """What was done for a request, in seconds since its arrival, in the order that it began: the
    reading of its conversation, and each engine's calls. slots: those that shared the call."""
    arrived_s = observed.events.arrived_s
    admitted_s = arrived_s + observed.result.timings.queued_s
    read_s = observed.submitted_s - arrived_s
    read = {"stage": "preprocessing", "start_s": 0.0, "end_s": read_s, "slots": [observed.slot]}
    spans = recorder.of_request(observed.slot, admitted_s)
    calls = [
        {
            "stage": span.stage,
            "start_s": span.start_s - arrived_s,
            "end_s": span.end_s - arrived_s,
            "slots": list(span.slots),
        }
        for span in spans
    ]
    return [read, *calls]


def name_of(answer: Answered) -> str:
    """Of its sound's file."""
    return f"{answer.number:04}-{answer.conversation.name}.wav"


def save(path: Path, result: SpeechResult) -> None:
    """The audio as a WAV file. A reply without speech leaves an empty one."""
    with WavFile(path, result.sample_rate) as file:
        file.write(result.audio)


if __name__ == "__main__":
    sys.exit(main())
