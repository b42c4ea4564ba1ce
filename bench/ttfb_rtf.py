"""Time to first sample, and real-time factor, of conversations, some of them at the same time.

    python -m bench.ttfb_rtf --model CHECKPOINT --requests 100 --concurrency 4 --json result.json
    python -m bench.ttfb_rtf conversations.jsonl --chunk-frames 1,2,4 --save-audio wavs/

Asks the conversations of a manifest (see bench/common/manifests.py), from the first again after the
last, each with its own seed; each of --concurrency callers asks one after the other. Definitions
are in testing/metrics.py. A request that fails counts in no figure; its row has its error.

A row is one request: its conversation and seed, its figures, its reply (text, and a digest of its
codes), its chunks, and for the first --timeline requests the engine calls for it. Times are in
seconds since its arrival; preprocessing_s: until its conversation had been read; admitted_s: until
it had a slot.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.common.manifests import SHIPPED, Conversation, read_conversations
from bench.common.models import add_model_arguments, chosen_checkpoint, load_chosen
from qwen3_omni_neuron import Qwen3Omni, Qwen3OmniError, SpeechResult
from qwen3_omni_neuron.events.speech_file import SpeechFile
from qwen3_omni_neuron.options import RequestOptions
from testing.command_line import Figures, Row, natural, parser_of, positive, run, sizes
from testing.headlines import of_speech
from testing.metrics import request_metrics, summarize
from testing.observed import Observed, Recorder, Span, observe

WARM_UP_TOKENS, WARM_UP_FRAMES = 8, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("ttfb_rtf", __doc__)
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
    return run("ttfb_rtf", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Ask all conversations. The rows are in the order of the requests."""
    conversations = read_conversations(options.manifest)
    if options.save_audio:
        options.save_audio.mkdir(parents=True, exist_ok=True)
    count = options.requests or len(conversations)
    recorder = Recorder() if options.timeline else None
    wrap = recorder.wrap if recorder else None
    asked = {
        "speaker": options.speaker,
        "thinker_max_new_tokens": options.thinker_max_new_tokens,
        "talker_max_new_tokens": options.talker_max_new_tokens,
        "chunk_frames": options.chunk_frames,
    }
    with (
        chosen_checkpoint(options) as checkpoint,
        load_chosen(checkpoint, options, options.concurrency, wrap) as omni,
    ):
        warm_up(omni, conversations, options.warm_up, asked)

        def ask(number: int) -> tuple[Row, Observed | None]:
            conversation = conversations[number % len(conversations)]
            seed = options.seed + number
            row = {"request": number, "conversation": conversation.name, "seed": seed}
            try:
                observed = observe(omni, conversation.messages, {**asked, "seed": seed})
            except Qwen3OmniError as error:
                return {**row, "error": str(error)}, None
            file = None
            if options.save_audio:
                file = f"{number:04}-{conversation.name}.wav"
                save(options.save_audio / file, observed.result)
            return {**row, "error": None, "audio_file": file}, observed

        start_s = time.perf_counter()
        with ThreadPoolExecutor(options.concurrency, "caller") as callers:
            answers = list(callers.map(ask, range(count)))
        wall_s = time.perf_counter() - start_s
    rows, figures = [], []
    for asked_row, observed in answers:
        rows.append(row := dict(asked_row))
        if observed is not None:
            figures.append(request_metrics(observed.events))
            row |= asdict(figures[-1]) | reply_of(observed)
            if recorder and row["request"] < options.timeline:
                row["timeline"] = timeline_of(observed, recorder)
    audio_s = sum(f.audio_s for f in figures)
    summary = {
        "failed_requests": len(rows) - len(figures),
        "wall_s": wall_s,
        "audio_s": audio_s,
        "audio_s_per_s": audio_s / wall_s,
        "requests_per_s": len(figures) / wall_s,
        **summarize(figures),
    }
    return rows, summary, of_speech(rows)


def warm_up(
    omni: Qwen3Omni, conversations: Sequence[Conversation], count: int, asked: dict[str, Any]
) -> None:
    """Ask for short replies, which no figure counts. Raises a request's own errors."""
    limits = {
        "thinker_max_new_tokens": min(WARM_UP_TOKENS, asked["thinker_max_new_tokens"]),
        "talker_max_new_tokens": min(WARM_UP_FRAMES, asked["talker_max_new_tokens"]),
    }
    for number in range(count):
        messages = conversations[number % len(conversations)].messages
        observe(omni, messages, {**asked, **limits, "seed": 0})


def reply_of(observed: Observed) -> Row:
    """Return a row's columns about its reply; see the module's docstring."""
    result = observed.result
    return {
        "preprocessing_s": observed.submitted_s - observed.events.arrived_s,
        "admitted_s": result.timings.queued_s,
        "prompt_tokens": result.timings.prompt_tokens,
        "text": result.text,
        "codes_sha256": hashlib.sha256(result.codes.astype("<i8").tobytes()).hexdigest(),
        "chunks": chunks_of(observed),
    }


def chunks_of(observed: Observed) -> list[dict[str, Any]]:
    """Return each chunk: its arrival since the request's, and its place in the audio."""
    chunks = observed.events.chunks
    firsts = accumulate((chunk.samples for chunk in chunks), initial=0)
    return [
        {
            "arrival_s": chunk.at_s - observed.events.arrived_s,
            "first_sample": first,
            "samples": chunk.samples,
            "frames": chunk.frames,
        }
        for chunk, first in zip(chunks, firsts, strict=False)
    ]


def timeline_of(observed: Observed, recorder: Recorder) -> list[dict[str, Any]]:
    """Return the stages of a request, in seconds since its arrival, ordered by their start.

    They are the reading of its conversation, and each engine call. slots: the slots in the call.
    """
    arrived_s = observed.events.arrived_s
    admitted_s = arrived_s + observed.result.timings.queued_s
    read = Span("preprocessing", arrived_s, observed.submitted_s, (observed.slot,))
    return [
        {
            "stage": span.stage,
            "start_s": span.start_s - arrived_s,
            "end_s": span.end_s - arrived_s,
            "slots": list(span.slots),
        }
        for span in (read, *recorder.of_request(observed.slot, admitted_s))
    ]


def save(path: Path, result: SpeechResult) -> None:
    """Write the audio as a WAV file, an empty one for a reply without speech."""
    with SpeechFile(path, result.sample_rate) as file:
        file.write(result.audio)


if __name__ == "__main__":
    sys.exit(main())
