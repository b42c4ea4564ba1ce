"""`qwen3-omni-neuron inspect`: shows what is in a compiled tree, or in a checkpoint.

Of a tree it shows the manifest, and checks its files; of a checkpoint, the forms of its tensors.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen3_omni_neuron.cli.parsing import CommandParser
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
from qwen3_omni_neuron.errors import CheckpointError, OptionError, printable


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


def add_inspect(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_inspect)
    parser.add_examples("inspect tree --verify", "inspect CHECKPOINT --json")
    parser.add_argument(
        "folder",
        metavar="DIR|ID",
        help="folder that compile wrote as --out, or a checkpoint: its folder, or its hub id, "
        "of which no weights are downloaded",
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash every file, and fail on the first that differs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON: the manifest, or the table"
    )


def _inspect(parsed: argparse.Namespace) -> int:
    """Print a tree's manifest, or the forms of a checkpoint's tensors. Returns the exit status."""
    folder = Path(parsed.folder)
    begun = any(folder.glob(f"*/{RECORD_FILE}"))  # a compile that did not end
    if not (begun or (folder / MANIFEST_FILE).exists()):
        _check_checkpoint(parsed.folder)
        if parsed.verify:
            raise OptionError("--verify is for compiled trees: a checkpoint has no hashes.")
        return _show_checkpoint(parsed)
    manifest = read_manifest(folder)
    if parsed.json:
        print(
            json.dumps(
                json.loads((folder / MANIFEST_FILE).read_bytes()) | {"verified": parsed.verify}
            )
        )
    else:
        print(_format(manifest))
    if not parsed.verify:
        check_files(folder, manifest)
        return 0
    verify_files(folder, manifest)
    if not parsed.json:
        files = [file for record in manifest.models.values() for file in record.files.values()]
        total = sum(file.bytes for file in files)
        print(f"\nverified: {len(files)} files, {total / MB:.1f} MB, every hash as it was")
    return 0


def _check_checkpoint(named: str) -> None:
    """Raise OptionError for what is no checkpoint's folder."""
    from qwen3_omni_neuron.checkpoint.files import local_folder

    try:
        folder = local_folder(named)
    except CheckpointError:
        found = "is a file" if Path(named).exists() else "does not exist"
    else:
        if folder is not None and (folder / "config.json").exists():
            return
        found = f"has neither {MANIFEST_FILE}, as a compiled tree, nor config.json, as a checkpoint"
        if folder is None:
            found = f"is no folder here: `hf download {named}` prints one to inspect"
    raise OptionError(
        f"{named} {found}. Name the folder that compile wrote as --out, or a checkpoint's folder."
    )


def _show_checkpoint(parsed: argparse.Namespace) -> int:
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.quantised import scales_of_inputs
    from qwen3_omni_neuron.cli.inspect_checkpoint import auto_dtype, checkpoint_rows

    checkpoint = Checkpoint(Path(parsed.folder))
    heading, *rows = checkpoint_rows(checkpoint)
    left = scales_of_inputs(checkpoint.headers())
    dtype = auto_dtype(checkpoint.folder)
    if parsed.json:
        tensors = [dict(zip(heading, row, strict=True)) for row in rows]
        shown = {
            "tensors": tensors,
            "scales of inputs left aside": left,
            "dtype auto on the CPU": dtype,
        }
        print(json.dumps(shown))
        return 0
    print(aligned([heading, *rows]) + "\n")
    if left:
        print(f"scales of the inputs of {left} matrices are left aside: no inputs are rounded")
    print(f"dtype auto on the CPU: {dtype}")
    return 0


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
