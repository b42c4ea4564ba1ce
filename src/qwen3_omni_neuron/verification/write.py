"""Writes a reference: transformers' answers and stages' results.

Each stage computes over its inputs in the reference's replies, recorded once, and again with the
weights of the CPU's dtypes.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import SINGLE_FILE, Checkpoint, resolve_checkpoint
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.checkpoint.tensor_file import write_tensors
from qwen3_omni_neuron.cpu.packing import Groups, quantise_groups
from qwen3_omni_neuron.engines.noise import TALKER, Noise, noise_of_frame
from qwen3_omni_neuron.errors import CheckpointError, OptionError, Qwen3OmniError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.oracle import Reference, ReferenceResult
from qwen3_omni_neuron.verification.reference import (
    TOP_K,
    Arrays,
    Question,
    SavedReference,
    as_array,
    config_digest,
    logits_arrays,
    text_rows,
    thinned,
)

ROUNDED = ("mixed", "int8", "int4")
"""Dtypes of the CPU whose weights differ. mixed: bfloat16 matrices and tables."""


def write_reference(
    model: str | Path,
    path: Path,
    questions: Sequence[Question],
    dtype: str = "float32",
    device: str = "cpu",
    tokens: int = 16,
    frames: int = 24,
    adapters: Sequence[AdapterPath] = (),
    progress: Callable[[str], object] = lambda line: None,
) -> None:
    """Run transformers; write its answers and stages' results to a file.

    Encoders and decoders also compute with int8 and int4 weights, unless the checkpoint is
    quantised; with adapters also with those of `mixed`. dtype: "float32" or "bfloat16". device:
    "cpu", "cuda" or "cuda:N". tokens, frames: most of an answer. Raises CheckpointError,
    OutputError, and the errors of `computing_on` and transformers.
    """
    folder = resolve_checkpoint(model)
    config = read_config(folder)
    if config.talker is None or config.code2wav is None:
        raise CheckpointError(f"{folder} can't speak: a reference is of a checkpoint that can.")
    prompt_builder = PromptBuilder(folder, config)
    with merged_checkpoint(folder, adapters) as merged, computing_on(device):

        def load() -> Reference:
            return Reference(merged, getattr(torch, dtype), None if device == "cpu" else device)

        progress(f"transformers {transformers.__version__} reads {folder} in {dtype} on {device}")
        reference, replies, answers = load(), [], []
        for number, question in enumerate(questions):
            progress(f"{number + 1} of {len(questions)}: {question.title}")
            prompt = prompt_builder.prompt(question.messages)
            reply = reference.generate(
                prompt,
                thinker_eos_token_id=config.im_end_id,
                thinker_min_new_tokens=2,
                thinker_max_new_tokens=tokens,
                talker_min_new_tokens=2,
                talker_max_new_tokens=frames + 1,
            )
            replies.append((prompt, reply))
            given: Arrays = {"seed": np.array(number)}
            answers.append((question, stage_results(reference, config, prompt, reply, given)))
        # Without adapters a released checkpoint is stored as "mixed".
        for rounded in () if read_settings(folder) else ROUNDED[not adapters :]:
            progress(f"encoders and decoders with weights of {rounded}")
            del reference
            gc.collect()
            reference = load()
            round_weights(reference.model, rounded)
            for (prompt, reply), (_, exact) in zip(replies, answers, strict=True):
                found = stage_results(reference, config, prompt, reply, exact)
                changed = {n: a for n, a in found.items() if not np.array_equal(a, exact[n])}
                exact |= {f"{rounded}/{name}": array for name, array in changed.items()}
    digest = config_digest(folder, adapters)
    SavedReference(digest, transformers.__version__, dtype, device, answers).save(path)


@torch.no_grad()
def stage_results(
    reference: Reference, config: OmniConfig, prompt: Prompt, reply: ReferenceResult, given: Arrays
) -> Arrays:
    """Compute all stages of the reference over the inputs of one of its replies.

    given: seed, and the results with exact weights, whose `hidden` and `accepted` the next stages
    get; by default this model's own.
    """
    assert config.talker is not None, "the checkpoint speaks"
    model, talker, codes = reference.model.thinker, reference.model.talker, reply.codes
    ids = prompt.token_ids.to(codes.device)
    thinker = reference.thinker_model(**_joined(reply.thinker_calls), output_hidden_states=True)
    accepted = thinker.hidden_states[config.talker.accept_hidden_layer][0, : len(prompt)]
    media = torch.isin(ids, ids.new_tensor(config.thinker.media_token_ids))
    start = reply.talker_calls[0]["inputs_embeds"].shape[1] - 1
    states = talker.model(**_joined(reply.talker_calls)).last_hidden_state[0]
    states = states[start:][: len(codes)]
    spoken = ids.new_tensor(text_rows(config, reply.token_ids, len(codes)))
    text = model.get_input_embeddings()(spoken)
    feedback = [table(codes[:, group]) for group, table in enumerate(_code_tables(talker))]
    found = {
        "prompt": prompt.token_ids.numpy(),
        "token_ids": np.array(reply.token_ids),
        "codes": codes.cpu().numpy(),
        **_encoders(reference, config, prompt),
        "accepted": as_array(accepted[media]),
        **logits_arrays("thinker", model.lm_head(thinker.last_hidden_state[0, len(prompt) - 1 :])),
        "text_projection": thinned(talker.text_projection(text)),
        "hidden": as_array(states),
        **logits_arrays("talker", talker.codec_head(states)),
        "feedback": as_array(torch.stack(feedback).sum(0)),
        "samples": as_array(reference.decode(codes)),
    }
    given = found | given
    accepted, hidden = (torch.from_numpy(given[n]).to(text) for n in ("accepted", "hidden"))
    noise, size = Noise(int(given["seed"]), TALKER), config.talker.predictor.vocab_size
    starts = [noise.at(frame) for frame in range(len(codes))]
    frames = np.stack([noise_of_frame(start, config.code_groups - 1, size) for start in starts])
    found["hidden_projection"] = thinned(talker.hidden_projection(accepted))
    found["seed"] = given["seed"]
    for kind, of_kind in (("greedy", np.zeros_like(frames)), ("sampled", frames)):
        draws = torch.from_numpy(of_kind).to(codes.device)
        chosen, margins = _predict(talker, hidden, codes[:, 0], draws)
        found[f"{kind}_codes"] = chosen.cpu().numpy()
        found[f"{kind}_margins"] = as_array(margins)
    return found


def _encoders(reference: Reference, config: OmniConfig, prompt: Prompt) -> Arrays:
    c, shortest = config.thinker, {"talker_min_new_tokens": 2, "talker_max_new_tokens": 2}
    reply = reference.generate(prompt, thinker_max_new_tokens=2, **shortest)
    call = reply.thinker_calls[0]
    rows = call["inputs_embeds"][0]
    ids = prompt.token_ids.to(rows.device)
    visual = rows[ids == c.image_token_id]
    levels = [visual, *call.get("deepstack_visual_embeds", ())]
    missing = 1 + len(c.vision.deepstack_layers) - len(levels)
    return {
        "audio": as_array(rows[ids == c.audio_token_id]),
        "vision": as_array(torch.stack([*levels, *[visual] * missing])),
    }


def _predict(talker: Any, hidden: Tensor, code0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [frames, 16] of the code predictor, and their margins [frames, 15].

    noise: [frames, 15, vocab], 0: greedy. A margin is a code's sum of logit and noise less the next
    one's, in standard deviations of the logits.
    """
    predictor, tables = talker.code_predictor, _code_tables(talker)
    rows, codes, margins = hidden[:, None], [code0], []
    for step, head in enumerate(predictor.lm_head):
        rows = torch.cat((rows, tables[step](codes[-1])[:, None]), 1)
        states = predictor.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        logits = head(states[:, -1]).float()
        kth = logits.topk(min(TOP_K, logits.shape[-1])).values[:, -1:]
        scores = (logits + noise[:, step]).masked_fill(logits < kth, float("-inf"))
        first, second = scores.topk(2).values.unbind(-1)
        codes.append(scores.argmax(-1))
        margins.append((first - second) / logits.std(-1))
    return torch.stack(codes, 1), torch.stack(margins, 1)


def _code_tables(talker: Any) -> list[Any]:
    return [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]


def _joined(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of one forward over the rows of a reply's calls."""
    rows = torch.cat([call["inputs_embeds"] for call in calls], 1)
    joined = {
        "inputs_embeds": rows,
        # Without a mask 4.57 treats an image's positions as several sequences.
        "attention_mask": rows.new_ones(rows.shape[:2], dtype=torch.long),
        "position_ids": torch.cat([call["position_ids"] for call in calls], -1),
        "use_cache": False,
    }
    if len(deepstack := calls[0].get("deepstack_visual_embeds", ())):
        mask = calls[0]["visual_pos_masks"]  # [1, S], in 4.57 [1, S, hidden]
        padding = mask.new_zeros(1, rows.shape[1] - mask.shape[1], *mask.shape[2:])
        joined["visual_pos_masks"] = torch.cat((mask, padding), 1)
        joined["deepstack_visual_embeds"] = deepstack
    return joined


# Matrices by their names in transformers 4.57 and 5, or a checkpoint, without the audio encoder's
# convolutions and the vision encoder's positions; the code predictor's down_proj is exact.
_ENCODERS = re.compile(
    r"thinker\.(?:model\.)?(?:audio_tower|visual)\.(?!conv2d|pos_embed)[\w.]+\.weight"
)
_THINKER = re.compile(r"thinker\.(?!.*(?:audio_tower|visual)\.).*_proj(?:\.weight)?")
_OTHERS = re.compile(
    r"thinker\.lm_head\.weight"
    r"|talker\.(?!code_predictor\..*\.down_proj).*(?:_proj|lm_head\.\d+|codec_head)(?:\.weight)?"
)


def rounded_weight(name: str, weight: Tensor, dtype: str) -> Tensor:
    """Return a parameter in float32 with the rounding of a dtype."""
    if weight.ndim < 2:
        return weight.float()
    weight = weight.bfloat16().float()
    in_encoder = _ENCODERS.fullmatch(name)
    if dtype == "int4" and _THINKER.fullmatch(name):
        groups = Groups()
        numbers, scale = quantise_groups(weight.bfloat16(), groups)
        wide = scale.float().repeat_interleave(groups.size, -1)[..., : weight.shape[-1]]
        return numbers.float() * wide
    if dtype == "mixed" or not (in_encoder or _THINKER.fullmatch(name) or _OTHERS.fullmatch(name)):
        return weight
    # The vision encoder's first weight is stored as a convolution, [out, channels, ...].
    whole, scale = quantise(weight.flatten(1) if in_encoder else weight)
    return (whole.float() * scale.unsqueeze(-1)).view(weight.shape)


@torch.no_grad()
def round_weights(model: Any, dtype: str) -> None:
    """Round a transformers model's weights in place, a stack's matrices one at a time."""
    for name, parameter in model.named_parameters():
        is_stack = parameter.ndim > 2 and not _ENCODERS.fullmatch(name)
        for matrix in parameter if is_stack else (parameter,):
            matrix.copy_(rounded_weight(name, matrix, dtype))


@contextmanager
def merged_checkpoint(folder: Path, adapters: Sequence[AdapterPath]) -> Iterator[Path]:
    """Write a checkpoint with merged adapters for transformers, until the block ends.

    Changed weights are in float32, others as they are stored. Raises CheckpointError.
    """
    if not adapters:
        yield folder
        return
    if read_settings(folder) is not None:
        raise CheckpointError(
            f"{folder} is quantised: a reference with adapters is of the one in bfloat16."
        )
    checkpoint = Checkpoint(folder, adapters)
    with TemporaryDirectory() as made, checkpoint.reader() as reader:
        for path in folder.resolve().iterdir():
            if ".safetensors" not in path.suffixes:
                (Path(made) / path.name).symlink_to(path)
        layout = {n: (stored.shape, reader.dtype(n)) for n, stored in checkpoint.headers().items()}
        tensors = ((name, reader.tensor(name).contiguous()) for name in layout)
        write_tensors(Path(made) / SINGLE_FILE, layout, tensors)
        yield Path(made)


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Let a GPU multiply float32 in float32, and explain errors of an unusable one.

    By default a GPU's convolutions round inputs to TF32: a row of code2wav differs by 3.7e-4, and
    verify allows 2.4e-5 in float32. Raises OptionError if torch has no such device or its memory is
    too small, or transformers lacks accelerate, which loads a model to a GPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        torch.empty(1, device=device)
        yield
    except (RuntimeError, AssertionError, ValueError) as error:
        if device == "cpu" or isinstance(error, Qwen3OmniError):
            raise
        raise OptionError(
            f"--device {device} can't be used: {str(error).splitlines()[0]} Pass a GPU with more "
            "memory, a torch built for CUDA with accelerate installed, or --device cpu."
        ) from error
