"""The compile plan: what is compiled, for what, in which sizes."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.errors import OptionError

TARGETS = ("cpu",)
PLANNED_TARGETS = ("neuron",)
DTYPES = ("float32", "bfloat16", "float64")
DEFAULT_CONTEXT_LENGTH = 8192
DEFAULT_CONCURRENCY = 8
CHUNK_FRAMES = (1, 2, 4, 8, 16, 25)
HEARING_GRAPHS = ("thinker", "vision", "audio")
SPEAKING_GRAPHS = ("talker", "code_predictor", "code2wav")
GRAPHS = (*HEARING_GRAPHS, *SPEAKING_GRAPHS)
_EVERY_GRAPH = ("target", "tp", "lnc", "dtype")
_BY_GRAPH = {
    "thinker": ("max_concurrency", "context_length", "prompt_buckets"),
    "vision": ("patch_buckets",),
    "audio": (),
    "talker": ("max_concurrency", "context_length", "prompt_buckets"),
    "code_predictor": ("max_concurrency",),
    "code2wav": ("max_concurrency", "chunk_frames"),
}


@dataclass(frozen=True)
class CompilePlan:
    """Made by `make_plan`, which checks it.

    model: the checkpoint's folder; where it lies is no part of what is compiled. tp: cores that
    share a graph's weights. lnc: physical cores a logical one. max_concurrency: slots, requests at
    a time. context_length: positions that a slot's KV cache holds. prompt_buckets, patch_buckets:
    lengths that prompts, and the frames of pictures, are padded to, ascending; none: no padding,
    which a CPU does not need. chunk_frames: sizes that the vocoder decodes, ascending.
    """

    model: Path
    target: str
    tp: int
    lnc: int
    dtype: str
    max_concurrency: int
    context_length: int
    prompt_buckets: tuple[int, ...]
    patch_buckets: tuple[int, ...]
    chunk_frames: tuple[int, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """All but where the checkpoint lies, as JSON has it: what `make_plan` takes."""
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        del settings["model"]
        return settings

    def graph_settings(self, graph: str) -> dict[str, Any]:
        """The part that one graph depends on. graph: one of GRAPHS."""
        return {name: self.settings[name] for name in (*_EVERY_GRAPH, *_BY_GRAPH[graph])}

    def command(self, out: Path) -> str:
        """The command line that compiles this plan into the folder `out`."""
        words = ["qwen3-omni-neuron", "compile", "--model", str(self.model), "--out", str(out)]
        for name, value in self.settings.items():
            flag = "--buckets" if name == "prompt_buckets" else "--" + name.replace("_", "-")
            if value != []:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words += [flag, text]
        return shlex.join(words)


def make_plan(
    model: Path,
    config: OmniConfig,
    target: str = "cpu",
    tp: int = 1,
    lnc: int = 1,
    dtype: str = "auto",
    max_concurrency: int = DEFAULT_CONCURRENCY,
    context_length: int | None = None,
    prompt_buckets: Sequence[int] = (),
    patch_buckets: Sequence[int] = (),
    chunk_frames: Sequence[int] = CHUNK_FRAMES,
) -> CompilePlan:
    """The plan that arguments and a checkpoint's config give: see CompilePlan.

    dtype: "auto" (the checkpoint's), or one of DTYPES. context_length: 8192, or the model's own
    limit where that is less. Raises OptionError that names the argument and what it may be.
    """
    if target in PLANNED_TARGETS:
        raise OptionError(
            f"target {target!r} is not there yet: this version compiles and runs for "
            f"{', '.join(TARGETS)}. Take target 'cpu', or a later version."
        )
    if target not in TARGETS:
        raise OptionError(f"target is one of {', '.join(TARGETS)}, got {target!r}.")
    for name, value in (("tp", tp), ("lnc", lnc)):
        if value != 1:
            raise OptionError(
                f"{name} is 1 for target cpu, which has no cores to split; got {value}."
            )
    if dtype not in ("auto", *DTYPES):
        raise OptionError(f"dtype is auto or one of {', '.join(DTYPES)}, got {dtype!r}.")
    if dtype == "auto" and config.dtype not in DTYPES:
        raise OptionError(
            f"this checkpoint is in {config.dtype}, which is not run; load it with dtype "
            f"{', '.join(DTYPES)}."
        )
    if max_concurrency < 1:
        raise OptionError(f"max_concurrency is 1 or more, got {max_concurrency}.")
    limit = config.thinker.text.max_positions
    if context_length is None:
        context_length = min(limit, DEFAULT_CONTEXT_LENGTH)
    if not 2 <= context_length <= limit:
        raise OptionError(
            f"context_length is 2 to {limit} for this checkpoint, got {context_length}."
        )
    if not chunk_frames:
        raise OptionError("chunk_frames names no size. The vocoder needs one, such as 25.")
    _check_sizes("prompt_buckets", prompt_buckets)
    _check_sizes("patch_buckets", patch_buckets)
    _check_sizes("chunk_frames", chunk_frames)
    if prompt_buckets and prompt_buckets[-1] > context_length:
        raise OptionError(
            f"prompt_buckets has {prompt_buckets[-1]}, and the KV cache {context_length} "
            "positions. Leave it out, or raise context_length."
        )
    block = config.thinker.vision.merge_size**2
    if odd := [size for size in patch_buckets if size % block]:
        raise OptionError(
            f"patch_buckets has {odd[0]}; a size is a multiple of {block}, the patches that become "
            "one row."
        )
    return CompilePlan(
        model,
        target,
        tp,
        lnc,
        config.dtype if dtype == "auto" else dtype,
        max_concurrency,
        context_length,
        tuple(prompt_buckets),
        tuple(patch_buckets),
        tuple(chunk_frames),
    )


def graphs_of(config: OmniConfig) -> tuple[str, ...]:
    """The graphs of a checkpoint; one without a talker has fewer."""
    speaks = config.talker is not None and config.code2wav is not None
    return GRAPHS if speaks else HEARING_GRAPHS


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Positive and ascending."""
    for before, size in zip((0, *sizes), sizes, strict=False):
        if size <= before:
            said = ", ".join(map(str, sizes))
            raise OptionError(f"{name} is a list of ascending sizes of 1 or more, got {said}.")
