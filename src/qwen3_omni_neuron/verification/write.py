"""Writes a reference: transformers' answers, and the results of its stages."""

import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import (
    SINGLE_FILE,
    Checkpoint,
    resolve_checkpoint,
    tensor_files,
)
from qwen3_omni_neuron.checkpoint.headers import INDEX_FILE
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.checkpoint.tensor_file import write_tensors
from qwen3_omni_neuron.errors import CheckpointError, NotInstalledError, OptionError, format_value
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.forced import Stages, record
from qwen3_omni_neuron.verification.oracle import Reference
from qwen3_omni_neuron.verification.questions import Question
from qwen3_omni_neuron.verification.reference import (
    About,
    ReferenceAnswer,
    config_digest,
    save_reference,
)
from qwen3_omni_neuron.verification.rounded_weights import ROUNDED, round_weights

TOKENS, FRAMES = 16, 24
# transformers reads all files in the order of their names, and the last tensor counts.
MERGED_FILE = "with-adapters.safetensors"
# Of this name it reads the file alone, without the index.
_SHARD = {SINGLE_FILE: "model-00001-of-00001.safetensors"}


def write_reference(
    model: str | Path,
    path: Path,
    questions: Sequence[Question],
    dtype: str = "float32",
    device: str = "cpu",
    tokens: int = TOKENS,
    frames: int = FRAMES,
    adapters: Sequence[AdapterPath] = (),
    progress: Callable[[str], object] = lambda line: None,
) -> None:
    """Ask transformers, and write its answers and its stages' results to a file.

    Encoders and decoders compute once more with the weights of int8 and of int4, unless the
    checkpoint is quantised; with adapters also with those of `mixed`. dtype: "float32" or
    "bfloat16". device: "cpu", "cuda" or "cuda:N". tokens, frames: most of an answer. Raises
    CheckpointError, OutputError, and the errors of `computing_on` and of transformers.
    """
    folder = resolve_checkpoint(model)
    config = read_config(folder)
    if config.talker is None or config.code2wav is None:
        raise CheckpointError(f"{folder} can't speak: a reference is of a checkpoint that can.")
    prompt_builder = PromptBuilder(folder, config)
    with merged_checkpoint(folder, adapters) as merged, computing_on(device):
        progress(f"transformers {transformers.__version__} reads {folder} in {dtype} on {device}")
        stages = Stages(_reference(merged, dtype, device), config)
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
            answers.append(ReferenceAnswer(question, arrays, {}))
        # Without adapters "mixed" is what a released checkpoint has stored.
        for rounded in () if read_settings(folder) else ROUNDED[not adapters :]:
            progress(f"encoders and decoders with weights of {rounded}")
            del stages
            gc.collect()
            stages = Stages(_reference(merged, dtype, device), config)
            round_weights(stages.reference.model, rounded)
            for number, (one, answer) in enumerate(zip(given, answers, strict=True)):
                hidden = torch.from_numpy(answer.arrays["hidden"])
                found = stages.outputs(one, hidden, torch.from_numpy(answer.arrays["uniforms"]))
                found |= stages.encoders(one.prompt)
                answers[number] = ReferenceAnswer(
                    answer.question, answer.arrays, {**answer.rounded, rounded: found}
                )
    about = About(config_digest(folder, adapters), transformers.__version__, dtype, device)
    save_reference(path, about, answers)


@contextmanager
def merged_checkpoint(folder: Path, adapters: Sequence[AdapterPath]) -> Iterator[Path]:
    """Write a checkpoint with adapters merged, for transformers, until the block ends.

    Its files are links, and MERGED_FILE has the changed weights in float32. Raises CheckpointError.
    """
    if not adapters:
        yield folder
        return
    if read_settings(folder) is not None:
        raise CheckpointError(
            f"{folder} is quantised: a reference with adapters is of the one in bfloat16."
        )
    checkpoint = Checkpoint(folder, adapters)
    headers = checkpoint.headers()
    names = sorted(checkpoint.merged_names)
    with TemporaryDirectory() as made, checkpoint.reader() as reader:
        into = Path(made)
        for path in folder.resolve().iterdir():
            if path.name != INDEX_FILE:
                (into / _SHARD.get(path.name, path.name)).symlink_to(path)
        layout = {name: (headers[name].shape, torch.float32) for name in names}
        tensors = ((name, reader.tensor(name).contiguous()) for name in names)
        write_tensors(into / MERGED_FILE, layout, tensors)
        files = {name: _SHARD.get(file, file) for name, file in tensor_files(folder).items()}
        index = {"metadata": {}, "weight_map": files | dict.fromkeys(names, MERGED_FILE)}
        (into / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
        yield into


def _reference(folder: Path, dtype: str, device: str) -> Reference:
    return Reference(folder, getattr(torch, dtype), None if device == "cpu" else device)


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Check that transformers can compute on a device, and let it multiply float32 in float32.

    By default a GPU's convolutions round their inputs to TF32: a row of code2wav then differs by
    3.7e-4, and verify allows 2.4e-5 in float32. Raises OptionError if torch has no such device or
    its memory is too small; NotInstalledError.
    """
    if device == "cpu":
        yield
        return
    _check_device(device)
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "ieee"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"--device {device} has too little memory: {str(error).partition(' If ')[0]} bfloat16 "
            "takes half as much as float32; or name a GPU with more memory, or --device cpu."
        ) from error
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def _check_device(device: str) -> None:
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise OptionError(
            f"--device takes cpu, or one GPU such as cuda or cuda:1, got {format_value(device)}."
        )
    number, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if not torch.cuda.is_available() or number >= count:
        raise OptionError(
            f"torch {torch.__version__} has no --device {device}: it finds {count} GPUs. Compare "
            "with what nvidia-smi lists, install a torch that is built for CUDA "
            "(https://pytorch.org/get-started), or give --device cpu."
        )
    if find_spec("accelerate") is None:
        raise NotInstalledError(
            f"--device {device} needs accelerate, with which transformers loads a model to a GPU. "
            "Install it: pip install accelerate"
        )
