"""Long speech: what a frame takes by its place in the stream, and what memory it leaves behind.

    python -m bench.long_speech --model CHECKPOINT --frames 4096 --json long_speech.json

Drives code2wav's step, then the talker with its code predictor, through that many frames of codes
made by a seed, so that nothing ends early; each by itself, nothing beside. A row is a window of 100
frames: the median time a frame, and after its last frame the process's peak so far, its memory
then, and the bytes of all live tensors.

Two verdicts, printed as pass, fail, or not measured:
- a code2wav frame takes as long at 3,000 to 3,100 as at 10 to 110, within a factor of 1.15;
- the peak of memory grows by no more than 4 MB from frame 256 to the last (the sound of 3,840
  frames alone would be 28 MB if something kept it). Where the engine is in another process, it is
  not measured.
There is none on the talker: each of its steps reads all frames before it, so a frame's time grows
with its place, by what the ratio says.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.arguments import natural, positive
from bench.common.memory import live_tensor_bytes, peak_mb, resident_mb
from bench.common.model_choice import add_model_arguments, chosen_checkpoint, load_chosen
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3OmniError
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.conversation.prompt import Prompt
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling, Talker, Vocoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions

Row = dict[str, Any]
Frame = Callable[[], object]
WINDOW = 100
EARLY, LATE = 110, 3100  # ends of the windows that are compared
WINDOW_ENDS = (EARLY, 256, 512, 1024, 2048, LATE, 4096)
SETTLED = 256  # from here on the peak is to stay
MOST_RATIO, MOST_GROWTH_MB = 1.15, 4.0
CODE2WAV, TALKER = "code2wav", "talker and code predictor"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing could be measured. A verdict is no status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--frames", type=positive, default=4096, help=f"{EARLY} or more")
    parser.add_argument("--chunk", type=positive, default=1, help="frames in a code2wav step")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args(arguments)
    try:
        if options.frames < EARLY:
            raise ValueError(f"--frames is {EARLY} or more, got {options.frames}.")
        with chosen_checkpoint(options) as checkpoint:
            rows = measure(checkpoint, options)
    except (Qwen3OmniError, ValueError) as error:
        print(f"long_speech.py: {error}", file=sys.stderr)
        return 1
    summary = summary_of(rows, here=options.placement == "shared")
    publish(results_of("long_speech", arguments, options, rows, summary), options.json)
    return 0


def measure(checkpoint: str | Path, options: argparse.Namespace) -> list[Row]:
    """The rows of both parts."""
    folder = resolve_checkpoint(checkpoint)
    config = read_config(folder)
    held: list[Engines] = []

    def hold(engines: Engines) -> Engines:
        held.append(engines)
        return engines

    with load_chosen(folder, options, 1, hold) as omni:
        (engines,) = held
        engines.enter_thread()
        if engines.talker is None or engines.vocoder is None:
            raise ValueError("this checkpoint has no talker: it can write text, not speak.")
        check_chunk(options.chunk, engines.vocoder.chunk_frames)
        chunks = decoded_chunks(engines.vocoder, config, options.chunk, options.seed)
        rows = windows(CODE2WAV, chunks, options.frames, options.chunk)
        prompt = omni.conversation.prompt([{"role": "user", "content": "Speak, and go on."}])
        room = engines.talker.context_length - len(prompt.talker)
        frames = spoken_frames(engines.talker, config, prompt, options.seed)
        return rows + windows(TALKER, frames, min(options.frames, room))


def check_chunk(chunk: int, compiled: Sequence[int]) -> None:
    """Raises ValueError for a size that code2wav has not: padded chunks end a stream."""
    if chunk not in compiled:
        sizes = ", ".join(map(str, compiled))
        raise ValueError(f"--chunk is one of {sizes} for this model, got {chunk}.")


def decoded_chunks(vocoder: Vocoder, config: OmniConfig, chunk: int, seed: int) -> Iterator[Frame]:
    """Calls that each decode the next chunk of one stream, and drop its sound."""
    assert config.code2wav is not None
    generator = torch.Generator().manual_seed(seed)
    shape = (chunk, config.code_groups)
    decode = vocoder.start
    while True:
        codes = torch.randint(0, config.code2wav.codebook_size, shape, generator=generator)
        yield partial(decode, (0,), (codes,))
        decode = vocoder.step


def spoken_frames(talker: Talker, config: OmniConfig, prompt: Prompt, seed: int) -> Iterator[Frame]:
    """Calls that each write the next frame of one slot, whose first code is drawn here rather than
    by the talker, and append it."""
    assert config.talker is not None
    draw = np.random.default_rng(seed)
    talker.prepare(0, prompt.talker, min(config.talker.speaker_ids.values()))
    talker.prefill(0, torch.zeros(0, 1), config.tts_pad_id)
    top_k, top_p = RequestOptions.predictor_top_k, RequestOptions.predictor_top_p

    def frame(code0: int, sampling: PredictorSampling) -> None:
        talker.predict((0,), (code0,), (sampling,))
        talker.step((0,), (config.tts_pad_id,))

    while True:
        uniforms = draw.random(config.code_groups - 1, dtype=np.float32)
        code0 = int(draw.integers(config.talker.predictor.vocab_size))
        sampling = PredictorSampling(uniforms, top_k, top_p)
        yield partial(frame, code0, sampling)


def windows(part: str, calls: Iterator[Frame], frames: int, chunk: int = 1) -> list[Row]:
    """Make calls, each of `chunk` frames, up to so many frames; a row a window that ends by then,
    and one that ends with the last."""
    ends = sorted({end for end in WINDOW_ENDS if end < frames} | {frames})
    rows: list[Row] = []
    seconds: list[float] = []  # a frame, one a call
    for call in calls:
        start_s = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - start_s) / chunk)
        done = chunk * len(seconds)
        if done >= ends[len(rows)]:
            end = ends[len(rows)]
            rows.append(
                {
                    "part": part,
                    "from_frame": end - WINDOW,
                    "to_frame": end,
                    "median_frame_s": statistics.median(
                        seconds[(end - WINDOW) // chunk : -(-end // chunk)]
                    ),
                    "peak_mb": peak_mb(),
                    "resident_mb": resident_mb(),
                    "live_tensor_bytes": live_tensor_bytes(),
                }
            )
        if len(rows) == len(ends):
            break
    return rows


def summary_of(rows: Sequence[Row], here: bool) -> dict[str, Any]:
    """here: whether the engines are in this process, whose memory was measured."""
    decoded = [row for row in rows if row["part"] == CODE2WAV]
    spoken = [row for row in rows if row["part"] == TALKER]
    ratio, growth_mb = time_ratio(decoded), peak_growth_mb(decoded) if here else None
    return {
        "code2wav_ratio": ratio,
        "code2wav_time_a_frame_does_not_grow": verdict(ratio, MOST_RATIO),
        "peak_growth_mb": growth_mb,
        "code2wav_memory_stays_flat": verdict(growth_mb, MOST_GROWTH_MB),
        "talker_ratio": time_ratio(spoken),
        "talker_frames": max(row["to_frame"] for row in spoken),
    }


def time_ratio(rows: Sequence[Row]) -> float | None:
    """A late frame's time over an early one's; None where the run ended before."""
    by_end = {row["to_frame"]: row["median_frame_s"] for row in rows}
    return by_end[LATE] / by_end[EARLY] if {EARLY, LATE} <= by_end.keys() else None


def peak_growth_mb(rows: Sequence[Row]) -> float | None:
    """How much the peak grew after the first frames; None where the run ended with them."""
    settled = [row["peak_mb"] for row in rows if row["to_frame"] >= SETTLED]
    return settled[-1] - settled[0] if len(settled) > 1 else None


def verdict(value: float | None, most: float) -> str:
    if value is None:
        return "not measured"
    return "pass" if value <= most else "fail"


if __name__ == "__main__":
    sys.exit(main())
