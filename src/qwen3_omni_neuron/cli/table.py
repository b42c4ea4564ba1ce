"""Tables in plain text, for the verbs compile and inspect."""

from collections.abc import Sequence

from qwen3_omni_neuron.compilation.manifest import GraphRecord

MB = 1e6


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


def graph_row(graph: str, record: GraphRecord, seconds: str) -> tuple[str, str, str, str]:
    """Return a graph's row: graph, buckets, seconds, MB."""
    buckets = [f"{name} {','.join(map(str, sizes))}" for name, sizes in record.buckets.items()]
    return graph, "; ".join(buckets) or "any", seconds, f"{record.bytes / MB:.1f}"
