"""Table of a checkpoint's tensors by part of the model and by form, for `inspect`."""

from collections import defaultdict
from math import prod
from pathlib import Path

import torch

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.headers import StoredTensor
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names, fitting
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.compilation.runner import MB
from qwen3_omni_neuron.cpu.precision import PRECISIONS, weight_forms
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.errors import OptionError

HEADING = ("part", "form", "bits", "a scale for", "tensors", "MB", "dtypes int8, int4")
_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def checkpoint_rows(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    """Return the heading and, for each part and form, a row of text.

    The last column says what the CPU's dtypes int8 and int4 do with quantised matrices: keep their
    numbers, or widen them and treat them as any weight. Only headers are read. Raises
    CheckpointError; see checkpoint.parameters.check_names and fitting.
    """
    _, parts = lay_out(read_config(checkpoint.folder))
    check_names(list(parts.values()), checkpoint)
    headers, quantised = checkpoint.headers(), checkpoint.quantised
    sizes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for part_name, part in parts.items():
        forms = weight_forms(PRECISIONS["int4"], part_name, part, quantised)
        kept = {p.name for t, pieces in part.pieces for p in pieces if forms[t].kind == "published"}
        pieces = [(target, piece) for target, pieces in part.pieces for piece in pieces]
        for target, piece in pieces:
            shape = (quantised.get(piece.name) or headers[piece.name]).shape
            stored = torch.empty(shape, device="meta")
            fitting(part.module.get_parameter(target), piece, stored)
        for name in {piece.name: None for _, piece in pieces}:
            form = quantised.get(name)
            if form is None:
                row, size = (part_name, *_of_plain(headers[name]), ""), headers[name].bytes
            else:
                use = "kept" if name in kept else "widened"
                row, size = (part_name, *_of_quantised(form), use), form.bytes
            sizes[row].append(size)
    rows: list[tuple[str, ...]] = [HEADING]
    for (*columns, use), each in sizes.items():
        rows.append((*columns, str(len(each)), f"{sum(each) / MB:.1f}", use))
    return rows


def auto_dtype(folder: Path) -> str:
    """Return the dtype that "auto" means for a checkpoint on the CPU, or why there is none."""
    try:
        return make_plan(folder, read_config(folder), LIMITS).dtype
    except OptionError as error:
        return f"none, as {error}"


def _of_plain(stored: StoredTensor) -> tuple[str, str, str]:
    """Return form, bits and what shares a scale, of a tensor that is not quantised."""
    bits = 8 * stored.bytes // max(prod(stored.shape), 1)
    return _PLAIN[stored.dtype], str(bits), ""


def _of_quantised(form: QuantisedForm) -> tuple[str, str, str]:
    (rows, inputs), (out, into) = form.block, form.shape
    if (rows, inputs) == (out, into):
        shares = "a matrix"
    elif rows > 1:
        shares = f"{rows} x {inputs}"
    else:
        shares = "a row" if inputs == into else f"{inputs} inputs"
    return form.label, str(form.bits), shares
