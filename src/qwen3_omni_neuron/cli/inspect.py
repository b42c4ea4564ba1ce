"""`qwen3-omni-neuron inspect`: shows what is in a compiled tree, or in a checkpoint.

Of a tree it shows the manifest, and checks its files; of a checkpoint, the forms of its tensors.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen3_omni_neuron.compilation.manifest import (
    MANIFEST_FILE,
    GraphRecord,
    Manifest,
    ModelRecord,
    TensorRecord,
    check_files,
    read_manifest,
    verify_files,
)
from qwen3_omni_neuron.compilation.runner import MB
from qwen3_omni_neuron.errors import OptionError


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
    parser.add_argument(
        "folder",
        metavar="DIR|ID",
        help="folder that compile wrote as --out, or a checkpoint: its folder, or its hub id, "
        "of which no weights are downloaded",
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash every file, and fail on the first that differs"
    )


def _inspect(parsed: argparse.Namespace) -> int:
    """Print a tree's manifest, or the forms of a checkpoint's tensors. Returns the exit status."""
    folder = Path(parsed.folder)
    is_tree = (folder / MANIFEST_FILE).exists()
    if not is_tree and ((folder / "config.json").exists() or not folder.exists()):
        if parsed.verify:
            raise OptionError("--verify is for compiled trees: a checkpoint has no hashes.")
        from qwen3_omni_neuron.checkpoint.hub_headers import open_headers
        from qwen3_omni_neuron.cli.inspect_checkpoint import (  # imports torch
            auto_dtype,
            checkpoint_rows,
        )

        with open_headers(parsed.folder) as headers:
            print(aligned(checkpoint_rows(headers)))
            print(f"\ndtype auto on the CPU: {auto_dtype(headers)}")
        return 0
    manifest = read_manifest(folder)
    print(_format(manifest))
    if parsed.verify:
        verify_files(folder, manifest)
        files = [file for record in manifest.models.values() for file in record.files.values()]
        total = sum(file.bytes for file in files)
        print(f"\nverified: {len(files)} files, {total / MB:.1f} MB, every hash as it was")
    else:
        check_files(folder, manifest)
    return 0


def _format(manifest: Manifest) -> str:
    lines = [f"checkpoint: {manifest.fingerprint}"]
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
