"""Writes a reference: transformers' answers, and the results of its stages."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.device import computing_on
from qwen3_omni_neuron.verification.forced import Stages, record
from qwen3_omni_neuron.verification.oracle import Reference
from qwen3_omni_neuron.verification.questions import Question
from qwen3_omni_neuron.verification.reference import About, Answer, config_digest, save_reference
from qwen3_omni_neuron.verification.rounding import ROUNDED, round_weights

TOKENS, FRAMES = 16, 24


def write_reference(
    model: str | Path,
    path: Path,
    questions: Sequence[Question],
    dtype: str = "float32",
    device: str = "cpu",
    tokens: int = TOKENS,
    frames: int = FRAMES,
    progress: Callable[[str], object] = lambda line: None,
) -> None:
    """Ask transformers, and write its answers and its stages' results to a file.

    Encoders and decoders compute once more with the weights of int8 and of int4, unless the
    checkpoint is quantised. dtype: "float32" or "bfloat16". device: "cpu", "cuda" or "cuda:N".
    tokens, frames: most of an answer. progress: called with a line of text for each step.
    Raises CheckpointError, OutputError, and the errors of `computing_on` and of transformers.
    """
    folder = resolve_checkpoint(model)
    config = read_config(folder)
    if config.talker is None or config.code2wav is None:
        raise CheckpointError(f"{folder} can't speak: a reference is of a checkpoint that can.")
    prompt_builder = PromptBuilder(folder, config)
    with computing_on(device):
        progress(f"transformers {transformers.__version__} reads {folder} in {dtype} on {device}")
        stages = Stages(_reference(folder, dtype, device), config)
        given, answers = [], []
        for number, question in enumerate(questions):
            progress(f"{number + 1} of {len(questions)}: {question.title}")
            prompt = prompt_builder.prompt(question.messages)
            one = record(stages.reference, prompt, config.im_end_id, tokens, frames)
            uniforms = np.random.default_rng(number).random(
                (len(one.codes), config.code_groups - 1), dtype=np.float32
            )
            arrays = {**stages.inputs(one), "uniforms": uniforms}
            arrays |= stages.outputs(one, None, torch.from_numpy(uniforms))
            given.append(one)
            answers.append(Answer(question, arrays, {}))
        for rounded in () if read_settings(folder) else ROUNDED:
            progress(f"encoders and decoders with weights of {rounded}")
            del stages
            gc.collect()
            stages = Stages(_reference(folder, dtype, device), config)
            round_weights(stages.reference.model, rounded)
            for number, (one, answer) in enumerate(zip(given, answers, strict=True)):
                hidden = torch.from_numpy(answer.arrays["hidden"])
                found = stages.outputs(one, hidden, torch.from_numpy(answer.arrays["uniforms"]))
                found |= stages.encoders(one.prompt)
                answers[number] = Answer(
                    answer.question, answer.arrays, {**answer.rounded, rounded: found}
                )
    about = About(config_digest(folder), transformers.__version__, dtype, device)
    save_reference(path, about, answers)


def _reference(folder: Path, dtype: str, device: str) -> Reference:
    return Reference(folder, getattr(torch, dtype), None if device == "cpu" else device)
