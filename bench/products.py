"""Products of bfloat16 matrices in 12 bits a number beside those in 16, by rows and threads.

    python -m bench.products --kernels avx512 --kernels avx2 --json products.json

Over random matrices of the shapes of the released code predictor's layers (five), or the thinker's
(attention and eight experts): more than a cache holds. Both forms take turns, a pass over all
matrices each, and their results must be the same to the bit.

A row has part, kernels, rows and threads; plain_bytes, compact_bytes; of a pass plain_s and
compact_s, the medians, and plain_min_s and compact_min_s; ratio: the median of the ratios of the
passes that follow each other; min_ratio: the fastest of one over the fastest of the other; repeats.
"""

import argparse
import ctypes
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from bench.common.measure import in_turn
from qwen3_omni_neuron.checkpoint.released import released_config
from qwen3_omni_neuron.cpu.compact import compact_shape
from qwen3_omni_neuron.cpu.native.binding import (
    TYPES,
    VOID,
    Library,
    Weights,
    check,
    ffi,
    pack_in_c,
)
from qwen3_omni_neuron.cpu.native.installed import find_library, library_path
from qwen3_omni_neuron.cpu.target import usable_cores
from testing.command_line import Figures, InputError, Row, parser_of, positive, run, sizes
from testing.headlines import headline

EXPERTS = 8
BETWEEN_ROWS = 48  # as decoders have it: rows a power of two apart would share few cache lines
PREDICTOR, THINKER = "code predictor", "thinker"
KERNELS = ("avx512", "avx2", "plain")
Shape = tuple[int, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("products", __doc__)
    parser.add_argument("--kernels", action="append", choices=KERNELS, help="those of this CPU")
    parser.add_argument("--rows", type=sizes, default=[1, 2, 3, 4, 6, 8, 12, 128, 2048])
    parser.add_argument("--threads", type=sizes, default=[usable_cores(), 1])
    parser.add_argument("--repeats", type=positive, default=60, help="fewer for many rows")
    return run("products", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Multiply in both forms. Raises InputError without the library or a kind of kernels."""
    library = find_library()
    if library is None:
        raise InputError("both forms are multiplied in C, and there is no library: see doctor.")
    rows: list[Row] = []
    for part, shapes in shapes_of().items():
        matrices = Matrices(shapes, library)
        for kernels in options.kernels or [None]:
            use_kernels(kernels)
            for threads in options.threads:
                library.grow_pool(threads)
                for count in options.rows:
                    row = matrices.row(count, threads, max(2, options.repeats // (1 + count // 12)))
                    rows.append({"part": part, "kernels": kernels, **row})
    summary = {case_of(row): row["ratio"] for row in rows}
    few = [row["ratio"] for row in rows if row["rows"] == 1]
    many = [row["ratio"] for row in rows if row["rows"] > 1]
    anchor = "12 bits over 16; 0.758 is that of the bytes"
    return rows, summary, [headline("one row", few, "", anchor), headline("more", many, "", anchor)]


def case_of(row: Row) -> str:
    kernels = row["kernels"] or "usual kernels"
    return f"{row['part']}, {kernels}, rows {row['rows']}, threads {row['threads']}"


def shapes_of() -> dict[str, list[Shape]]:
    """Return the shapes of the matrices that each part has, [out, into]."""
    config = released_config()
    assert config.talker is not None and config.thinker.text.moe is not None
    c, text = config.talker.predictor, config.thinker.text
    moe = config.thinker.text.moe
    predictor = [
        ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden_size),
        (c.hidden_size, c.heads * c.head_dim),
        (2 * c.ffn_width, c.hidden_size),
        (c.hidden_size, c.ffn_width),
    ]
    experts = [(2 * moe.expert_width, text.hidden_size), (text.hidden_size, moe.expert_width)]
    attention = [
        ((text.heads + 2 * text.kv_heads) * text.head_dim, text.hidden_size),
        (text.hidden_size, text.heads * text.head_dim),
    ]
    layer = attention + EXPERTS * experts
    return {PREDICTOR: c.layers * predictor, THINKER: 2 * layer}


def use_kernels(name: str | None) -> None:
    """Take the kernels of a kind of processor. Raises InputError where this one lacks them."""
    if name and not ctypes.CDLL(str(library_path())).use_kernels(f"_{name}".encode()):
        raise InputError(f"this processor has no kernels {name}: leave --kernels out.")


class Matrices:
    """Matrices in both forms."""

    def __init__(self, shapes: Sequence[Shape], library: Library):
        generator = torch.Generator().manual_seed(0)
        self._library, self._weights = library, Weights()
        self._forms: tuple[list[Any], list[Any]] = [], []
        self._bytes = [2 * sum(map(prod, shapes)), sum(prod(compact_shape(s)) for s in shapes)]
        self._widest = max(into for _, into in shapes)
        self._outs = [out for out, _ in shapes]
        for shape in shapes:
            matrix = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            plain = pack_in_c(matrix, library)
            panels = self._weights(plain, *plain.shape, dtype=plain.dtype)
            compact = self._weights.packed(matrix, library)
            fields = {**compact, "panels": panels, "type": TYPES[plain.dtype]}
            for form, described in zip(self._forms, (fields, compact), strict=True):
                form.append(ffi.new("Matrix *", described))

    def row(self, rows: int, threads: int, repeats: int) -> Row:
        """Return a row of the results."""
        x = torch.randn(rows, self._widest + BETWEEN_ROWS)
        ys = [[torch.empty(rows, out) for out in self._outs] for _ in self._forms]
        calls = [list(zip(form, y, strict=True)) for form, y in zip(self._forms, ys, strict=True)]

        passes = [partial(self._multiply, form, x, threads) for form in calls]
        plain, compact = in_turn(passes, repeats)
        for one, other in zip(*ys, strict=True):
            if not torch.equal(one, other):
                raise InputError(f"products of {rows} rows differ between the two forms.")
        return {
            "rows": rows,
            "threads": threads,
            "plain_bytes": self._bytes[0],
            "compact_bytes": self._bytes[1],
            "plain_s": statistics.median(plain),
            "compact_s": statistics.median(compact),
            "plain_min_s": min(plain),
            "compact_min_s": min(compact),
            "ratio": statistics.median(b / a for a, b in zip(plain, compact, strict=True)),
            "min_ratio": min(compact) / min(plain),
            "repeats": repeats,
        }

    def _multiply(self, form: Sequence[tuple[Any, Tensor]], x: Tensor, threads: int) -> None:
        rows, stride, inputs = len(x), x.shape[1], ffi.cast(VOID, x.data_ptr())
        for matrix, y in form:
            to = ffi.cast(VOID, y.data_ptr())
            check(self._library.multiply_rows(matrix, rows, inputs, stride, to, threads))


if __name__ == "__main__":
    sys.exit(main())
