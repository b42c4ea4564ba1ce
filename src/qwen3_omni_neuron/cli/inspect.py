"""`qwen3-omni-neuron inspect`: shows and checks a tree's manifest, or a checkpoint's tensors."""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.cli.parsing import add_examples
from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    RECORD_FILE,
    GraphRecord,
    Manifest,
    ModelRecord,
    TensorRecord,
    check_files,
    read_manifest,
    verify_files,
)
from qwen3_omni_neuron.compilation.runner import MB
from qwen3_omni_neuron.errors import OptionError, printable

if TYPE_CHECKING:
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm

HEADING = ("part", "form", "bits", "a scale for", "tensors", "MB", "dtypes int8, int4")
_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines: the first two columns left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def model_row(model: str, record: ModelRecord, seconds: str) -> tuple[str, str, str, str]:
    """Return a model's row: model, buckets, seconds, MB."""
    buckets = [f"{name} {','.join(map(str, sizes))}" for name, sizes in record.buckets.items()]
    return model, "; ".join(buckets) or "any", seconds, f"{record.bytes / MB:.1f}"


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_inspect)
    add_examples(parser, "inspect tree --verify", "inspect CHECKPOINT --json")
    parser.add_argument("folder", metavar="DIR", help="compiled tree, or checkpoint folder")
    parser.add_argument(
        "--verify", action="store_true", help="hash every file; fail at the first mismatch"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON: the manifest, or the table"
    )


def _inspect(parsed: argparse.Namespace) -> int:
    folder = Path(parsed.folder)
    begun = any(folder.glob(f"*/{RECORD_FILE}"))  # an unfinished compile
    if not (begun or (folder / MANIFEST_FILE).exists()):
        _check_checkpoint(parsed.folder)
        if parsed.verify:
            raise OptionError("--verify is for compiled trees: a checkpoint has no hashes.")
        return _show_checkpoint(parsed)
    manifest = read_manifest(folder)
    if parsed.json:
        kept = json.loads((folder / MANIFEST_FILE).read_bytes())
        print(json.dumps(kept | {"verified": parsed.verify}, allow_nan=False))
    else:
        print(_format(manifest))
    if not parsed.verify:
        check_files(folder, manifest)
        return 0
    verify_files(folder, manifest)
    if not parsed.json:
        files = [file for record in manifest.models.values() for file in record.files.values()]
        total = sum(file.bytes for file in files)
        print(f"\nverified: {len(files)} files, {total / MB:.1f} MB, all hashes match")
    return 0


def _check_checkpoint(named: str) -> None:
    folder = Path(named)
    if (folder / "config.json").exists():
        return
    found = "is a file" if folder.exists() else "does not exist"
    if folder.is_dir():
        found = f"has neither {MANIFEST_FILE}, as a compiled tree, nor config.json, as a checkpoint"
    raise OptionError(
        f"{named} {found}. Name the folder that compile wrote as --out, or a checkpoint's folder; "
        "`hf download ID` prints the folder of a hub id."
    )


def _show_checkpoint(parsed: argparse.Namespace) -> int:
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.quantised import scales_of_inputs

    checkpoint = Checkpoint(Path(parsed.folder))
    heading, *rows = checkpoint_rows(checkpoint)
    left = scales_of_inputs(checkpoint.headers())
    dtype = auto_dtype(checkpoint.folder)
    if parsed.json:
        tensors = [dict(zip(heading, row, strict=True)) for row in rows]
        about = {"scales of inputs left aside": left, "dtype auto on the CPU": dtype}
        print(json.dumps({"tensors": tensors} | about, allow_nan=False))
        return 0
    print(aligned([heading, *rows]) + "\n")
    if left:
        print(f"input scales of {left} matrices are ignored: inputs are not rounded to them")
    print(f"dtype auto on the CPU: {dtype}")
    return 0


def checkpoint_rows(checkpoint: "Checkpoint") -> list[tuple[str, ...]]:
    """Return the heading and a row for each part and form.

    The last column: whether the CPU's dtypes int8 and int4 keep a quantised matrix's numbers, or
    widen them. Only headers are read. Raises CheckpointError; see checkpoint.parameters.check_names
    and fitting.
    """
    import torch

    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.checkpoint.modules import lay_out
    from qwen3_omni_neuron.checkpoint.parameters import check_names, fitting
    from qwen3_omni_neuron.cpu.precision import PRECISIONS, weight_forms

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
            empty = torch.empty(shape, device="meta")
            fitting(part.module.get_parameter(target), piece, empty)
        for name in {piece.name: None for _, piece in pieces}:
            form = quantised.get(name)
            if form is None:
                stored, size = headers[name], headers[name].bytes
                bits = str(8 * size // max(prod(stored.shape), 1))
                row = (part_name, _PLAIN[stored.dtype], bits, "", "")
            else:
                use = "kept" if name in kept else "widened"
                row, size = (part_name, *_of_quantised(form), use), form.bytes
            sizes[row].append(size)
    rows: list[tuple[str, ...]] = [HEADING]
    for (*columns, use), each in sizes.items():
        rows.append((*columns, str(len(each)), f"{sum(each) / MB:.1f}", use))
    return rows


def auto_dtype(folder: Path) -> str:
    """Return the dtype that "auto" means for a checkpoint on the CPU, or its error."""
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.compilation.plan import make_plan
    from qwen3_omni_neuron.cpu.target import LIMITS

    try:
        return make_plan(folder, read_config(folder), LIMITS).dtype
    except OptionError as error:
        return f"none, as {error}"


def _of_quantised(form: "QuantisedForm") -> tuple[str, str, str]:
    (rows, inputs), (out, into) = form.block, form.shape
    if (rows, inputs) == (out, into):
        shares = "a matrix"
    elif rows > 1:
        shares = f"{rows} x {inputs}"
    else:
        shares = "a row" if inputs == into else f"{inputs} inputs"
    return form.label, str(form.bits), shares


def _format(manifest: Manifest) -> str:
    lines = [f"checkpoint: {manifest.fingerprint}"]
    lines += [f"adapter: {printable(adapter, 300)}" for adapter in manifest.adapters]
    for name, value in manifest.plan.items():
        text = (",".join(map(str, value)) or "any") if isinstance(value, list) else value
        lines.append(f"{name}: {text}")
    lines.append("versions: " + ", ".join(f"{n} {v}" for n, v in manifest.versions.items()))
    rows = [("model", "bucket", "seconds", "MB")]
    for model, record in manifest.models.items():
        rows.append(model_row(model, record, f"{record.seconds:.2f}"))
    lines += ["", aligned(rows)]
    for model, record in manifest.models.items():
        if record.graphs:  # on a CPU nothing is traced
            lines += ["", f"{model}:", *(f"  {_graph(graph)}" for graph in record.graphs)]
    return "\n".join(lines)


def _graph(graph: GraphRecord) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in graph.bucket.items())
    state = f", state of {len(graph.state)} tensors" if graph.state else ""
    return f"{graph.name}[{sizes}]: {_tensors(graph.inputs)}{state} -> {_tensors(graph.outputs)}"


def _tensors(specs: Mapping[str, TensorRecord]) -> str:
    return ", ".join(
        f"{name} {spec.dtype} [{', '.join(map(str, spec.shape))}]" for name, spec in specs.items()
    )
