"""Time of one call of each stage, in every size that it is called in.

    python -m bench.stages --model CHECKPOINT --prompts 128,512,2048 --json stages.json
    python -m bench.stages --model CHECKPOINT --profile mine.json    # for bench.replay --profile

The engines are called as the runtime calls them, with nothing else running: a time is what a call
costs its caller, also where the engine is in another process or on a device. Rows, with null for
what does not apply:

- stage: thinker prefill, thinker decode, talker prepare (a prompt's rows but the last, during the
  thinker's prefill), talker prefill (the last row, with the thinker's first token), talker step,
  code predictor, code2wav start, code2wav step, audio encoder, vision encoder;
- batch: slots in the call, each with a token of its own; rows: of the prompt, or in the KV cache
  before the first timed step (one more for each repeat); frames: codec frames per slot, or mel
  frames (10 ms) of the audio encoder; patches: of an image;
- median_s, min_s, max_s, repeats.

The encoders run on the CPU in this process, over weights of their own, before the engines load.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.common.measure import in_turn, median_row, nothing, repeated, timed
from bench.common.models import (
    add_model_arguments,
    chosen_checkpoint,
    loaded_engines,
    released_sampling,
    written_messages,
)
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, resolve_checkpoint
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.precision import PRECISIONS, library_for
from qwen3_omni_neuron.cpu.target import CPU, usable_cores
from qwen3_omni_neuron.engines.protocols import Engines, Talker, Thinker, Vocoder
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
    sizes,
)
from testing.headlines import headline
from testing.models import load_host_models
from testing.packed import packed_and_widened
from testing.prompts import random_visual
from testing.replaying.profiles import measured_profile
from testing.results import machine

TOKEN = 1  # of one slot any token: all take the same time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("stages", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=sizes, default=[128, 512, 1024], help="rows of prompts")
    parser.add_argument("--batches", type=sizes, default=[1, 4], help="slots in a step")
    parser.add_argument(
        "--chunk-frames", type=sizes, help="of code2wav; default: all compiled ones"
    )
    parser.add_argument("--audio-seconds", type=sizes, default=[1, 8, 30])
    parser.add_argument(
        "--pictures", type=sizes, default=[8, 32], help="patches along an image's side, even"
    )
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument(
        "--profile", type=Path, help="write a profile for bench.replay to this file"
    )
    return run("stages", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every stage. The summary has the medians of each stage's smallest sizes."""
    with chosen_checkpoint(options) as checkpoint:
        rows = list(rows_of(resolve_checkpoint(checkpoint), options))
    if options.profile is not None:
        source = f"bench/stages.py on {machine()['cpu']}, medians of {options.repeats} calls"
        measured_profile(rows, options.profile.stem, source).save(options.profile)
    summary = {row["stage"]: row["median_s"] for row in reversed(rows)}
    return rows, summary, [headline(stage, [least], "s") for stage, least in summary.items()]


def rows_of(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every row, one stage after the other."""
    config = read_config(folder)
    yield from encoder_rows(folder, config, options)
    with loaded_engines(folder, options, max(options.batches)) as (prompt_builder, engines):
        prompts = [
            prompt_builder.prompt(written_messages(prompt_builder, rows))
            for rows in options.prompts
        ]
        check_room(engines, prompts, options.repeats)
        yield from thinker_rows(engines.thinker, prompts, options)
        if engines.talker is not None and engines.vocoder is not None:
            yield from talker_rows(engines.talker, config, prompts, options)
            yield from vocoder_rows(engines.vocoder, config, options)


def check_room(engines: Engines, prompts: Sequence[Prompt], repeats: int) -> None:
    """Raise InputError where the longest prompt and the steps after it exceed the KV cache."""
    wanted = [(engines.thinker.context_length, max(map(len, prompts)))]
    if engines.talker is not None:
        rows = max(len(prompt.talker) for prompt in prompts)
        wanted.append((engines.talker.context_length, rows))
    for context_length, rows in wanted:
        if rows + 1 + repeats > context_length:
            raise InputError(
                f"{rows} rows and {1 + repeats} steps do not fit into a KV cache of "
                f"{context_length} positions. Take shorter --prompts, or fewer --repeats."
            )


def encoder_rows(folder: Path, config: OmniConfig, options: argparse.Namespace) -> Iterator[Row]:
    """Time the audio encoder by seconds of audio, and the vision encoder by images."""
    plan = make_plan(folder, config, CPU.limits, dtype=options.dtype)
    spec = EngineSpec(plan, config, newline_id=0)
    library, threads = library_for(plan.dtype), options.threads or torch.get_num_threads()
    models = load_host_models(Checkpoint(folder), config, spec.dtype)
    assert models.audio_encoder is not None and models.vision_encoder is not None
    # Which of the two modules is timed: without the library torch computes with widened weights.
    kind = int(PRECISIONS[plan.dtype].packed and library is None)
    encoder = packed_and_widened(models.audio_encoder, "audio_encoder", plan.dtype)[kind]
    eye = packed_and_widened(models.vision_encoder, "vision_encoder", plan.dtype)[kind]
    c = config.thinker
    if library is None:
        audio, vision = CpuAudio(encoder), CpuVision(eye)
    else:
        from qwen3_omni_neuron.cpu.native.engines import native_audio, native_vision

        library.grow_pool(min(threads, usable_cores()))
        audio = native_audio(encoder, library, threads)
        vision = native_vision(eye, library, threads)
    with torch.inference_mode():
        for seconds in options.audio_seconds:
            mel = [torch.rand(c.audio.mel_bins, 100 * seconds)]
            times = repeated(partial(audio.encode, mel), options.repeats)
            yield row_of("audio encoder", times, batch=1, frames=100 * seconds)
        for side in options.pictures:
            image = [random_visual(folder, (1, side, side))]
            times = repeated(partial(vision.encode, image), options.repeats)
            yield row_of("vision encoder", times, batch=1, patches=side * side)


def thinker_rows(
    thinker: Thinker,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
    beside: Callable[[], None] = nothing,
) -> Iterator[Row]:
    """Time prefill by length; decode by length and batch. beside: called after each timed call."""
    for prompt in prompts:
        prefill = repeated(partial(thinker.prefill, 0, prompt), options.repeats, beside)
        yield row_of("thinker prefill", prefill, batch=1, rows=len(prompt))
    for prompt in prompts:
        for batch in options.batches:
            slots = list(range(batch))
            for slot in slots:
                thinker.prefill(slot, prompt)
            tokens = [TOKEN + slot for slot in slots]  # which choose different experts
            times = repeated(partial(thinker.step, slots, tokens), options.repeats, beside)
            yield row_of("thinker decode", times, batch=batch, rows=len(prompt) + 1)


def talker_rows(
    talker: Talker,
    config: OmniConfig,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
    beside: Callable[[], None] = nothing,
) -> Iterator[Row]:
    """Time both halves of a prefill by length; step and code predictor by length and batch.

    beside: called after each step, and so after each frame.
    """
    assert config.talker is not None
    speaker, accepted = min(config.talker.speaker_ids.values()), torch.zeros(0, 1)
    draw = np.random.default_rng(options.seed)

    for prompt in prompts:
        halves = (
            partial(talker.prepare, 0, prompt.talker, speaker),
            partial(talker.prefill, 0, accepted, TOKEN),
        )
        prepare, prefill = in_turn(halves, 1 + options.repeats)
        rows = len(prompt.talker)
        yield row_of("talker prepare", prepare[1:], batch=1, rows=rows - 1)
        yield row_of("talker prefill", prefill[1:], batch=1, rows=rows)
    for prompt in prompts:
        for batch in options.batches:
            slots = list(range(batch))
            for slot in slots:
                talker.prepare(slot, prompt.talker, speaker)
                talker.prefill(slot, accepted, TOKEN + slot)
            tokens = [TOKEN + slot for slot in slots]
            predict, step = [], []
            for _ in range(1 + options.repeats):
                how = [released_sampling(draw) for _ in slots]
                predict.append(timed(partial(talker.predict, slots, tokens, how)))
                step.append(timed(partial(talker.step, slots, [config.tts_pad_id] * batch)))
                beside()
            rows = len(prompt.talker) + 1
            if prompt is prompts[0]:  # earlier frames make no difference to it
                yield row_of("code predictor", predict[1:], batch=batch, frames=1)
            yield row_of("talker step", step[1:], batch=batch, rows=rows, frames=1)


def vocoder_rows(
    vocoder: Vocoder,
    config: OmniConfig,
    options: argparse.Namespace,
    beside: Callable[[], None] = nothing,
) -> Iterator[Row]:
    """Time first and later chunks by frames and batch. beside: called after each timed call."""
    assert config.code2wav is not None
    generator = torch.Generator().manual_seed(options.seed)
    for frames in options.chunk_frames or vocoder.chunk_frames:
        for batch in options.batches:
            slots = list(range(batch))
            shape = (batch, frames, config.code_groups)
            codes = torch.randint(0, config.code2wav.codebook_size, shape, generator=generator)
            chunks = list(codes)
            for name, decode in (("start", vocoder.start), ("step", vocoder.step)):
                times = repeated(partial(decode, slots, chunks), options.repeats, beside)
                yield row_of(f"code2wav {name}", times, batch=batch, frames=frames)


def row_of(stage: str, times: Sequence[float], **size: int) -> Row:
    """Return a row; see the module's docstring."""
    sizes_of_all = dict.fromkeys(("batch", "rows", "frames", "patches"))
    return {"stage": stage, **sizes_of_all, **size, **median_row(times)}


if __name__ == "__main__":
    sys.exit(main())
