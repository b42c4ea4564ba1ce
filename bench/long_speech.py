"""Long speech: the time of a frame by its place in the stream, and memory that stays in use.

    python -m bench.long_speech --model CHECKPOINT --frames 4096 --json long_speech.json

Calls code2wav's step, then the talker with its code predictor, for this many frames of random
codes, so that nothing ends early; one after the other, with nothing else running. A row is a window
of 100 frames: the median time per frame, and after its last frame the process's peak memory so far,
its memory then, and the bytes of all live tensors.

Two verdicts, printed as pass, fail, or not measured:
- a code2wav frame takes as long at 3,000 to 3,100 as at 10 to 110, within a factor of 1.15;
- the peak of memory grows by no more than 4 MB from frame 256 to the last (the audio of 3,840
  frames alone would be 28 MB if something kept it). It is not measured where the engine is in
  another process.
The talker has no verdict: each of its steps reads all frames before it, so a frame's time grows
with its place; talker_ratio says by how much.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.common.measure import timed
from bench.common.models import (
    add_model_arguments,
    chosen_checkpoint,
    loaded_engines,
    released_sampling,
)
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.engines.protocols import PredictorSampling, Talker, Vocoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.command_line import (
    Figures,
    InputError,
    Row,
    natural,
    parser_of,
    positive,
    run,
)
from testing.headlines import Headline, headline
from testing.memory import live_tensor_bytes, peak_mb, resident_mb

Frame = Callable[[], object]
WINDOW = 100
EARLY, LATE = 110, 3100  # ends of the windows that are compared
WINDOW_ENDS = (EARLY, 256, 512, 1024, 2048, LATE, 4096)
SETTLED = 256  # the peak should not grow after this frame
MOST_RATIO, MOST_GROWTH_MB = 1.15, 4.0
CODE2WAV, TALKER = "code2wav", "talker and code predictor"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status, which does not depend on the verdicts."""
    parser = parser_of("long_speech", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--frames", type=positive, default=4096, help=f"{EARLY} or more")
    parser.add_argument("--chunk", type=positive, default=1, help="frames in a code2wav step")
    parser.add_argument("--seed", type=natural, default=0)
    return run("long_speech", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure both parts, code2wav first."""
    if options.frames < EARLY:
        raise InputError(f"--frames is {EARLY} or more, got {options.frames}.")
    with chosen_checkpoint(options) as checkpoint:
        folder = resolve_checkpoint(checkpoint)
        config = read_config(folder)
        with loaded_engines(folder, options, 1) as (prompt_builder, engines):
            if engines.talker is None or engines.vocoder is None:
                raise InputError("this checkpoint has no talker: it can write text, not speak.")
            check_chunk(options.chunk, engines.vocoder.chunk_frames)
            chunks = decoded_chunks(engines.vocoder, config, options.chunk, options.seed)
            rows = windows(CODE2WAV, chunks, options.frames, options.chunk)
            prompt = prompt_builder.prompt([{"role": "user", "content": "Speak, and go on."}])
            most = engines.talker.context_length - len(prompt.talker)
            frames = spoken_frames(engines.talker, config, prompt, options.seed)
            rows += windows(TALKER, frames, min(options.frames, most))
    summary = summary_of(rows, here=options.placement == "shared")
    return rows, summary, headlines_of(summary)


def headlines_of(summary: dict[str, Any]) -> list[Headline]:
    """Return what late frames take over early ones, and the growth of memory."""
    most, growth = f"goal {MOST_RATIO:g} at most", f"goal {MOST_GROWTH_MB:g} MB at most"
    return [
        headline("code2wav, late frame / early", [summary["code2wav_ratio"]], "", most),
        headline("talker, late frame / early", [summary["talker_ratio"]]),
        headline("memory grown", [summary["peak_growth_mb"]], "MB", growth),
    ]


def check_chunk(chunk: int, compiled: Sequence[int]) -> None:
    """Raise InputError for a size that was not compiled: only a last chunk may be padded."""
    if chunk not in compiled:
        sizes = ", ".join(map(str, compiled))
        raise InputError(f"--chunk is one of {sizes} for this model, got {chunk}.")


def decoded_chunks(vocoder: Vocoder, config: OmniConfig, chunk: int, seed: int) -> Iterator[Frame]:
    """Yield calls that each decode the next chunk of one stream, and drop its audio."""
    assert config.code2wav is not None
    generator = torch.Generator().manual_seed(seed)
    shape = (chunk, config.code_groups)
    decode = vocoder.start
    while True:
        codes = torch.randint(0, config.code2wav.codebook_size, shape, generator=generator)
        yield partial(decode, (0,), (codes,))
        decode = vocoder.step


def spoken_frames(talker: Talker, config: OmniConfig, prompt: Prompt, seed: int) -> Iterator[Frame]:
    """Yield calls that each generate the next frame of one slot, and append it.

    The first code of each frame is drawn here, so that the talker never ends.
    """
    assert config.talker is not None
    draw = np.random.default_rng(seed)
    talker.prepare(0, prompt.talker, min(config.talker.speaker_ids.values()))
    talker.prefill(0, torch.zeros(0, 1), config.tts_pad_id)

    def frame(code0: int, sampling: PredictorSampling) -> None:
        talker.predict((0,), (code0,), (sampling,))
        talker.step((0,), (config.tts_pad_id,))

    while True:
        sampling = released_sampling(draw)
        yield partial(frame, int(draw.integers(config.talker.predictor.vocab_size)), sampling)


def windows(part: str, calls: Iterator[Frame], frames: int, chunk: int = 1) -> list[Row]:
    """Make calls, each of `chunk` frames, up to `frames` frames.

    Returns a row for each window that ends before the last frame, and one that ends with it.
    """
    rows: list[Row] = []
    seconds: list[float] = []  # per frame, for each call
    for end in sorted({end for end in WINDOW_ENDS if end < frames} | {frames}):
        while chunk * len(seconds) < end:
            seconds.append(timed(next(calls)) / chunk)
        window_s = seconds[(end - WINDOW) // chunk : -(-end // chunk)]
        rows.append(
            {
                "part": part,
                "from_frame": end - WINDOW,
                "to_frame": end,
                "median_frame_s": statistics.median(window_s),
                "peak_mb": peak_mb(),
                "resident_mb": resident_mb(),
                "live_tensor_bytes": live_tensor_bytes(),
            }
        )
    return rows


def summary_of(rows: Sequence[Row], here: bool) -> dict[str, Any]:
    """Return ratios and verdicts. here: whether the engines run in the measured process."""
    decoded, spoken = ([r for r in rows if r["part"] == part] for part in (CODE2WAV, TALKER))
    settled = [row["peak_mb"] for row in decoded if row["to_frame"] >= SETTLED]
    growth_mb = settled[-1] - settled[0] if here and len(settled) > 1 else None
    ratio = time_ratio(decoded)
    return {
        "code2wav_ratio": ratio,
        "code2wav_time_a_frame_does_not_grow": verdict(ratio, MOST_RATIO),
        "peak_growth_mb": growth_mb,
        "code2wav_memory_stays_flat": verdict(growth_mb, MOST_GROWTH_MB),
        "talker_ratio": time_ratio(spoken),
        "talker_frames": max(row["to_frame"] for row in spoken),
    }


def time_ratio(rows: Sequence[Row]) -> float | None:
    """Return a late frame's time over an early one's; None if the run ended before."""
    by_end = {row["to_frame"]: row["median_frame_s"] for row in rows}
    return by_end[LATE] / by_end[EARLY] if {EARLY, LATE} <= by_end.keys() else None


def verdict(value: float | None, most: float) -> str:
    """Return pass, fail, or not measured."""
    if value is None:
        return "not measured"
    return "pass" if value <= most else "fail"


if __name__ == "__main__":
    sys.exit(main())
