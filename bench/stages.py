"""Each stage by itself, in every size that it is called in: what one call takes.

    python -m bench.stages --model CHECKPOINT --prompts 128,512,2048 --json stages.json
    python -m bench.stages --model CHECKPOINT --profile mine.json    # for replay.py --profile

The engines are called as the runtime calls them, with nothing beside: what a call costs its caller,
in another process or on a device as well. Rows, with what does not apply left null:

- stage: thinker prefill, thinker decode, talker prepare (a prompt's rows, while the thinker still
  reads), talker prefill (the last row, once it has answered), talker step, code predictor, code2wav
  start, code2wav step, audio encoder, vision encoder;
- batch: slots in the call; rows: of the prompt that is read, or before the step (a KV cache's
  length when the first was timed; one more for each repeat); frames: codec frames a slot, or of the
  audio encoder mel frames (10 ms); patches: of a picture;
- median_s, min_s, max_s, repeats.

The encoders run on the CPU in this process, over weights of their own, before the others are read.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.arguments import natural, positive, sizes
from bench.common.long_prompts import written_messages
from bench.common.measure import median_row, repeated, timed
from bench.common.model_choice import add_model_arguments, chosen_checkpoint, load_chosen
from bench.common.results import machine, publish, results_of
from bench.replaying.measured_profile import measured_profile
from qwen3_omni_neuron import Qwen3OmniError
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, resolve_checkpoint
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.conversation.prompt import Patches, Prompt
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling, Talker, Thinker, Vocoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions
from testing.host_models import load_host_models

Row = dict[str, Any]
TOKEN = 1  # any; what a token is costs nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing could be measured."""
    options = _parser().parse_args(arguments)
    try:
        with chosen_checkpoint(options) as checkpoint:
            rows = list(measure(checkpoint, options))
    except (Qwen3OmniError, ValueError) as error:
        print(f"stages.py: {error}", file=sys.stderr)
        return 1
    summary: dict[str, Any] = {}
    for row in rows:
        # The first of a stage is that of its smallest sizes.
        summary.setdefault(row["stage"], row["median_s"])
    publish(results_of("stages", arguments, options, rows, summary), options.json)
    if options.profile is not None:
        source = f"bench/stages.py on {machine()['cpu']}, medians of {options.repeats} calls"
        measured_profile(rows, options.profile.stem, source).save(options.profile)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=sizes, default=[128, 512, 1024], help="rows of prompts")
    parser.add_argument("--batches", type=sizes, default=[1, 4], help="slots in a step")
    parser.add_argument(
        "--chunk-frames", type=sizes, help="of code2wav; default: each that is compiled"
    )
    parser.add_argument("--audio-seconds", type=sizes, default=[1, 8, 30])
    parser.add_argument(
        "--pictures", type=sizes, default=[8, 32], help="patches along a picture's side, even"
    )
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument("--profile", type=Path, help="write what bench/replay.py takes here")
    return parser


def measure(checkpoint: str | Path, options: argparse.Namespace) -> Iterator[Row]:
    """Every row, a stage after the other."""
    folder = resolve_checkpoint(checkpoint)
    config = read_config(folder)
    yield from encoder_rows(folder, config, options)
    held: list[Engines] = []

    def hold(engines: Engines) -> Engines:
        held.append(engines)
        return engines

    with load_chosen(folder, options, max(options.batches), hold) as omni:
        (engines,) = held
        engines.enter_thread()
        prompts = [
            omni.conversation.prompt(written_messages(omni.conversation, rows))
            for rows in options.prompts
        ]
        check_room(engines, prompts, options.repeats)
        yield from thinker_rows(engines.thinker, prompts, options)
        if engines.talker is not None and engines.vocoder is not None:
            yield from talker_rows(engines.talker, config, prompts, options)
            yield from vocoder_rows(engines.vocoder, config, options)


def check_room(engines: Engines, prompts: Sequence[Prompt], repeats: int) -> None:
    """Raises ValueError where the longest prompt leaves no room for the steps after it."""
    wanted = [(engines.thinker.context_length, max(map(len, prompts)))]
    if engines.talker is not None:
        rows = max(len(prompt.talker) for prompt in prompts)
        wanted.append((engines.talker.context_length, rows))
    for context_length, rows in wanted:
        if rows + 1 + repeats > context_length:
            raise ValueError(
                f"{rows} rows and {1 + repeats} steps do not fit into a KV cache of "
                f"{context_length} positions. Take shorter --prompts, or fewer --repeats."
            )


def encoder_rows(folder: Path, config: OmniConfig, options: argparse.Namespace) -> Iterator[Row]:
    """The audio encoder by seconds of sound, the vision encoder by pictures."""
    dtype = getattr(torch, make_plan(folder, config, CPU.limits, dtype=options.dtype).dtype)
    models = load_host_models(Checkpoint(folder), config, dtype)
    assert models.audio_encoder is not None and models.vision_encoder is not None
    audio, vision = CpuAudio(models.audio_encoder), CpuVision(models.vision_encoder)
    c = config.thinker
    with torch.inference_mode():
        for seconds in options.audio_seconds:
            mel = [torch.rand(c.audio.mel_bins, 100 * seconds)]
            times = repeated(partial(audio.encode, mel), options.repeats)
            yield row_of("audio encoder", times, batch=1, frames=100 * seconds)
        for side in options.pictures:
            values = torch.rand(side * side, c.vision.patch_values)
            picture = [Patches(values, (1, side, side))]
            times = repeated(partial(vision.encode, picture), options.repeats)
            yield row_of("vision encoder", times, batch=1, patches=side * side)


def thinker_rows(
    thinker: Thinker, prompts: Sequence[Prompt], options: argparse.Namespace
) -> Iterator[Row]:
    """Prefill by length; decode by length and batch."""
    for prompt in prompts:
        prefill = repeated(partial(thinker.prefill, 0, prompt), options.repeats)
        yield row_of("thinker prefill", prefill, batch=1, rows=len(prompt))
    for prompt in prompts:
        for batch in options.batches:
            slots = list(range(batch))
            for slot in slots:
                thinker.prefill(slot, prompt)
            tokens = [TOKEN] * batch
            times = repeated(partial(thinker.step, slots, tokens), options.repeats)
            yield row_of("thinker decode", times, batch=batch, rows=len(prompt) + 1)


def talker_rows(
    talker: Talker, config: OmniConfig, prompts: Sequence[Prompt], options: argparse.Namespace
) -> Iterator[Row]:
    """The prompt in its two halves, by length; step and code predictor by length and batch."""
    assert config.talker is not None
    speaker, accepted = min(config.talker.speaker_ids.values()), torch.zeros(0, 1)
    draw = np.random.default_rng(options.seed)

    def sampling() -> PredictorSampling:
        uniforms = draw.random(config.code_groups - 1, dtype=np.float32)
        return PredictorSampling(
            uniforms, RequestOptions.predictor_top_k, RequestOptions.predictor_top_p
        )

    for prompt in prompts:
        prepare, prefill = [], []
        for _ in range(1 + options.repeats):
            prepare.append(timed(partial(talker.prepare, 0, prompt.talker, speaker)))
            prefill.append(timed(partial(talker.prefill, 0, accepted, TOKEN)))
        rows = len(prompt.talker)
        yield row_of("talker prepare", prepare[1:], batch=1, rows=rows - 1)
        yield row_of("talker prefill", prefill[1:], batch=1, rows=rows)
    for prompt in prompts:
        for batch in options.batches:
            slots = list(range(batch))
            for slot in slots:
                talker.prepare(slot, prompt.talker, speaker)
                talker.prefill(slot, accepted, TOKEN)
            predict, step = [], []
            for _ in range(1 + options.repeats):
                how = [sampling() for _ in slots]
                predict.append(timed(partial(talker.predict, slots, [TOKEN] * batch, how)))
                step.append(timed(partial(talker.step, slots, [config.tts_pad_id] * batch)))
            rows = len(prompt.talker) + 1
            if prompt is prompts[0]:  # it sees nothing of what came before the frame
                yield row_of("code predictor", predict[1:], batch=batch, frames=1)
            yield row_of("talker step", step[1:], batch=batch, rows=rows, frames=1)


def vocoder_rows(
    vocoder: Vocoder, config: OmniConfig, options: argparse.Namespace
) -> Iterator[Row]:
    """First and later chunks, by frames and batch."""
    assert config.code2wav is not None
    generator = torch.Generator().manual_seed(options.seed)
    for frames in options.chunk_frames or vocoder.chunk_frames:
        for batch in options.batches:
            slots = list(range(batch))
            shape = (batch, frames, config.code_groups)
            codes = torch.randint(0, config.code2wav.codebook_size, shape, generator=generator)
            chunks = list(codes)
            for name, decode in (("start", vocoder.start), ("step", vocoder.step)):
                times = repeated(partial(decode, slots, chunks), options.repeats)
                yield row_of(f"code2wav {name}", times, batch=batch, frames=frames)


def row_of(
    stage: str,
    times: Sequence[float],
    batch: int,
    rows: int | None = None,
    frames: int | None = None,
    patches: int | None = None,
) -> Row:
    """See the top of this file."""
    size = {"batch": batch, "rows": rows, "frames": frames, "patches": patches}
    return {"stage": stage, **size, **median_row(times)}


if __name__ == "__main__":
    sys.exit(main())
