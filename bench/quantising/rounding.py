"""Number formats of matrices, and modules that compute with the rounding of a format."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.checkpoint.parameters import Part, converted, put_parameter
from qwen3_omni_neuron.cpu.packing import Groups
from qwen3_omni_neuron.cpu.precision import PRECISIONS, WeightForm, weight_form
from qwen3_omni_neuron.cpu.rounded_inputs import round_inputs_of
from qwen3_omni_neuron.model.decoder import Decoder

ROWS_AT_ONCE = 4096  # bounds the memory beside the result; a multiple of the C's panel
# By what a parameter's name has: the first one that fits counts.
KINDS = {
    "qkv": "attention in",
    "attention.out": "attention out",
    "shared": "shared expert",
    "gate_up": "gate and up",
    "down": "down",
    "head": "head",
}
ENCODERS = {"audio_encoder": "audio encoder", "vision_encoder": "vision encoder"}


@dataclass(frozen=True)
class Format:
    """Type of a matrix's numbers, and how many inputs share a scale.

    bits: 16 (bfloat16, as stored), 8 or 4. group: None where all inputs of an output share one.
    """

    bits: int = 16
    group: int | None = None

    def __str__(self) -> str:
        name = "bfloat16" if self.bits == 16 else f"int{self.bits}"
        return name if self.group is None else f"{name}/{self.group}"

    def rounded(self, matrix: Tensor) -> Tensor:
        """Return a bfloat16 matrix [..., out, into] with its rounding, in float32."""
        if self.bits == 16:
            return matrix.float()
        rows = matrix.flatten(0, -2)
        wide = torch.empty(rows.shape)
        for to, some in zip(wide.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True):
            to.copy_(self._rounded_rows(some))
        return wide.view(matrix.shape)

    def _rounded_rows(self, rows: Tensor) -> Tensor:
        into = rows.shape[1]
        if self.bits == 4:
            assert self.group is not None
            shape = tuple(rows.shape)
            form = WeightForm("int4", torch.bfloat16, shape, shape, Groups(self.group))
            return form.widen(form.keep("", rows), "")
        size = self.group or into
        padded = F.pad(rows, (0, -into % size))
        whole, scale = quantise(padded.reshape(-1, size))
        return (whole.float() * scale[:, None]).view(padded.shape)[:, :into]


BFLOAT16, INT8, INT8_128, INT8_32 = Format(), Format(8), Format(8, 128), Format(8, 32)
INT4_32, INT4_128 = Format(4, 32), Format(4, 128)

FP8_BLOCKS: Mapping[str, tuple[int, int | None]] = {"a row": (1, None), "128 x 128": (128, 128)}
"""Rows and inputs that share a scale in published FP8 checkpoints. None: all inputs."""


def as_fp8(matrix: Tensor, rows: int, inputs: int | None) -> Tensor:
    """Return a matrix [out, into] with the rounding of FP8 (e4m3), in float32.

    rows, inputs: of a block, see FP8_BLOCKS; its largest weight becomes 448.
    """
    (out, into), wide = matrix.shape, matrix.float()
    inputs = inputs or into
    # [row blocks, rows, column blocks, inputs]
    blocks = F.pad(wide, (0, -into % inputs, 0, -out % rows))
    blocks = blocks.unflatten(1, (-1, inputs)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 448
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2, 3).flatten(0, 1)[:out, :into]


@dataclass(frozen=True)
class Choice:
    """Formats of one model's matrices.

    layers: of attention and feed-forward; encoders: of both encoders; down: of the feed-forward's
    second matrix, None where it is as `layers`; residual: type that a decoder layer's output is
    rounded to; only: part of the names of the parameters that are rounded, the others are as
    stored; dtypes: those of the package that are like this.
    """

    layers: Format
    head: Format
    encoders: Format = BFLOAT16
    down: Format | None = None
    residual: torch.dtype = torch.float32
    only: str = ""
    dtypes: tuple[str, ...] = ()

    def format_of(self, kind: str | None) -> Format:
        """Return the format of a kind of matrix; see `kind_of`."""
        if kind is None:
            return BFLOAT16
        own = {"head": self.head, "down": self.down or self.layers}
        own |= dict.fromkeys(ENCODERS.values(), self.encoders)
        return own.get(kind, self.layers)


STORED = Choice(BFLOAT16, BFLOAT16, dtypes=("mixed",))
"""bfloat16 numbers are float32 numbers: over a checkpoint in bfloat16 this is float32, too."""
RESIDUAL = Choice(BFLOAT16, BFLOAT16, residual=torch.bfloat16)
"""The least that an implementation rounds that computes in bfloat16, as most do: a yardstick."""
PREDICTOR_SAME = Choice(INT8, INT8, down=BFLOAT16)
"""The code predictor of dtypes int8 and int4 with predictor_dtype "same"."""
_GROUPED = (Choice(INT8_128, INT8_128), Choice(INT8_32, INT8_32))
CHOICES = {
    "thinker": (
        STORED,
        RESIDUAL,
        Choice(INT8, INT8, dtypes=("int8",)),
        *_GROUPED,
        Choice(INT4_32, INT8, dtypes=("int4",)),
        Choice(INT4_128, INT8),
        Choice(INT4_32, INT4_32),
        Choice(INT4_32, BFLOAT16),
    ),
    "talker": (STORED, RESIDUAL, Choice(INT8, INT8, dtypes=("int8", "int4")), *_GROUPED),
    "code_predictor": (
        replace(STORED, dtypes=("mixed", "int8", "int4")),
        RESIDUAL,
        PREDICTOR_SAME,
        Choice(INT8, INT8),
        *_GROUPED,
        Choice(INT4_32, INT4_32),
    ),
}
"""Formats to compare, by the name of a model in checkpoint.modules.Models."""
ENCODER_CHOICES = (
    STORED,
    *(Choice(BFLOAT16, BFLOAT16, form) for form in (INT8, INT8_32)),
)
"""Formats of the encoders to compare."""
SPOKEN_CHOICES = (
    STORED,
    Choice(BFLOAT16, BFLOAT16, INT8),
    Choice(BFLOAT16, BFLOAT16, INT8_32),
    Choice(INT8, INT8),
    Choice(INT8, INT8, INT8, dtypes=("int8",)),
    Choice(INT4_32, INT8, INT8, dtypes=("int4",)),
)
"""Formats of the encoders and the thinker to compare over spoken questions."""


def kind_of(part: str, module: nn.Module, target: str) -> str | None:
    """Return the kind of a parameter's matrix, or None where no format rounds it.

    part: the module's name in checkpoint.modules.Models.
    """
    form = weight_form(PRECISIONS["int8"], part, module, target)
    if part in ENCODERS:
        return ENCODERS[part] if form.kind == "int8" else None
    exact = part == "code_predictor" and target.endswith("down.weight")
    if form.kind != "int8" and not exact:
        return None
    return next(kind for name, kind in KINDS.items() if name in target)


class RelativeErrors:
    """Root mean square error of matrices over their root mean square, by kind and format."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = {}

    def add(self, kind: str, form: Format, stored: Tensor, rounded: Tensor) -> None:
        """Count one parameter, [..., out, into] both."""
        sums = self._sums.setdefault((kind, str(form)), [0.0, 0.0])
        blocks = (t.flatten(0, -2).split(ROWS_AT_ONCE) for t in (stored, rounded))
        for before, after in zip(*blocks, strict=True):
            wide = before.float()
            sums[0] += float((after - wide).square().sum())
            sums[1] += float(wide.square().sum())

    def items(self) -> Iterator[tuple[str, str, float]]:
        """Yield kind, format and error."""
        for (kind, form), (off, whole) in self._sums.items():
            yield kind, form, (off / whole) ** 0.5


def stored_weights(
    checkpoint: Checkpoint, name: str, part: Part, tails: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a part by name, in bfloat16.

    tails: whether matrices get heavy tails, see `heavy_tailed`.
    """
    for target, stored in converted(part, checkpoint, torch.bfloat16):
        heavy = tails and kind_of(name, part.module, target) is not None
        yield target, heavy_tailed(stored) if heavy else stored


def heavy_tailed(matrix: Tensor) -> Tensor:
    """Return w |w| of each weight, at the deviation of before.

    Normal weights get a kurtosis of 11.7 instead of 3, and the largest of 1024 is 6 deviations
    instead of 3.2. One matrix of a stack at a time, which bounds the memory.
    """
    heavy = torch.empty_like(matrix)
    for to, some in zip(
        *(t.flatten(0, -2).split(ROWS_AT_ONCE) for t in (heavy, matrix)), strict=True
    ):
        wide = some.float()
        to.copy_(wide * wide.abs() / (3**0.5 * wide.std()))
    return heavy


def fill(
    name: str,
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    choice: Choice = STORED,
    errors: RelativeErrors | None = None,
) -> None:
    """Set a module's parameters, in float32 with the rounding of a choice; tables as they are.

    name: the module's in checkpoint.modules.Models. errors: gets those of every rounded matrix.
    """
    for target, stored in weights:
        owner = module.get_submodule(target.rpartition(".")[0])
        if isinstance(owner, nn.Embedding):
            put_parameter(module, target, stored)
            continue
        kind = kind_of(name, module, target)
        form = choice.format_of(kind) if choice.only in target else BFLOAT16
        wide = form.rounded(stored)
        if errors is not None and kind is not None and form != BFLOAT16:
            errors.add(kind, form, stored, wide)
        put_parameter(module, target, wide)
        round_inputs_of(module, target, f"int{form.bits}")


def round_residual(decoder: Decoder, choice: Choice) -> None:
    """Let a decoder's layers round what they return to a choice's type of the residual."""
    if choice.residual == torch.float32:
        return

    def rounded(layer: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return out.to(choice.residual).float()

    for layer in decoder.layers:
        layer.register_forward_hook(rounded)
