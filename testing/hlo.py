"""A lint of a graph's HLO by the published error codes of neuronx-cc, and one of its StableHLO.

It reads text; testing/hlo_table.py lowers graphs to HLO.
Source: aws-neuron-sdk, compiler/error-codes.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import torch

from bench.trn2.cost import Scatter

INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)")
INTEGERS = frozenset({"s64", "u64", "s32", "u32", "s16", "u16", "s8", "u8"})
UNSUPPORTED = {
    "dynamic-reshape": "dynamic shape",
    "set-dimension-size": "dynamic shape",
    "triangular-solve": "no kernel",
    "cholesky": "no kernel",
    "fft": "no kernel",
    "while": "loop over data",
    "conditional": "branch on data",
    "rng": "random numbers",
    "rng-bit-generator": "EVRF006 random numbers",
}


@dataclass
class Findings:
    """Counts of instructions.

    ops: counts of all instructions by name. rejected: instructions that the compiler refuses.
    noted: instructions that the compiler, or its caller, replaces by another form. scatters: those
    of a StableHLO module.
    """

    ops: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    scatters: list[Scatter] = field(default_factory=list)


def lint_hlo(text: str) -> Findings:
    """Count the instructions of HLO text as XLA prints it."""
    found = Findings()
    types: dict[str, str] = {}
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, result, op, rest = match.groups()
        types[name] = _dtype(result)
        operands = re.findall(r"%[\w.\-]+", rest.split(")")[0])
        found.ops[op] += 1
        _check(op, result, rest, [types.get(operand, "") for operand in operands], found)
    return found


STABLEHLO = re.compile(r"\s*(?:%[^=]+ = )?\"?([a-z]\w*)\.(\w+)\"?(.*)")
# The last line of a scatter: what it is written into, the indices, and the numbers.
SCATTER_TYPES = re.compile(r"\}\) : \(tensor<(\S+)>, tensor<\S+>, tensor<(\S+)>\) ->")
DTYPES = {
    **{"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "i1": torch.bool},
    **{"i64": torch.int64, "i32": torch.int32, "i8": torch.int8},
}
NOT_FIXED = frozenset({"while", "case", "if", "rng", "rng_bit_generator", "dynamic_reshape"})


def lint_stablehlo(text: str) -> Findings:
    """Count the operations of a StableHLO module's text.

    Rejected are operations of another dialect, custom calls, sizes that are not fixed, loops,
    branches, random numbers, complex numbers, and float64 numbers other than scalars. Noted is the
    error function of a GELU, which StableHLO has in its extension CHLO alone.
    """
    found = Findings()
    lines = text.splitlines()
    for at, line in enumerate(lines):
        match = STABLEHLO.match(line)
        if match is None:
            continue
        dialect, op, rest = match.groups()
        if op == "scatter":
            types = next(filter(None, map(SCATTER_TYPES.search, lines[at:])))
            (target, dtype), (numbers, _) = map(_count, types.groups())
            found.scatters.append(Scatter(numbers, dtype, target * dtype.itemsize))
        if dialect == "func":
            continue
        found.ops[op] += 1
        if dialect != "stablehlo":
            found.rejected[f"{dialect}.{op}"] += 1
        if op == "custom_call" and "@mhlo.erf(" in rest:
            found.noted["erf"] += 1
        elif op == "custom_call" or op in NOT_FIXED:
            found.rejected[op + "".join(re.findall(r"@[\w.]+", rest)[:1])] += 1
        for kind in re.findall(r"tensor<[^>]*(?:\?|complex|\dxf64)[^>]*>", rest):
            found.rejected[kind] += 1
    return found


def _count(kind: str) -> tuple[int, torch.dtype]:
    """Return the count of numbers in a tensor of StableHLO, such as 2x3xf32, and their type."""
    *sizes, dtype = kind.split("x")
    return math.prod(map(int, sizes)), DTYPES[dtype]


def _check(op: str, result: str, rest: str, operands: list[str], found: Findings) -> None:
    kind = _dtype(result)
    first = operands[0] if operands else ""
    if "<=" in result:
        found.rejected["EMOD025 dynamic shape"] += 1
    if op in UNSUPPORTED:
        found.rejected[f"{op}: {UNSUPPORTED[op]}"] += 1
    if kind in {"c64", "c128"}:
        found.rejected["EVRF004 complex"] += 1
    if kind == "f64":
        # A Python number is a parameter f64[] that is converted at once.
        scalar = op in {"parameter", "constant"} and result.startswith("f64[]")
        (found.noted if scalar else found.rejected)["f64 scalar" if scalar else "f64"] += 1
    if kind == "s64":
        found.noted["s64, computed as s32"] += 1
    if op == "convolution":
        _check_convolution(rest, found)
    if op == "dot" and first in INTEGERS:
        found.rejected["EVRF035 dot of integers"] += 1
    if op == "scatter" and kind in INTEGERS:
        found.rejected["EVRF060 scatter of integers"] += 1
    if op == "sort" and (first in INTEGERS or not first):
        found.rejected["EVRF013 sort of integers"] += 1
    elif op == "sort":
        found.noted["sort (a top-k of floats)"] += 1
    if op == "reduce-window":
        found.rejected[_running(result, rest)] += 1


def _running(result: str, rest: str) -> str:
    if "lhs_dilate=" in rest or "rhs_dilate=" in rest:
        return "EVRF017/018 dilated reduce-window"
    if result.startswith("("):
        return "EVRF019 reduce-window of several operands"
    return "reduce-window (a running sum)"


def _check_convolution(rest: str, found: Findings) -> None:
    if "lhs_dilate=" not in rest:
        return
    if "rhs_dilate=" in rest:
        found.rejected["EVRF010 input and kernel dilation"] += 1
    elif "stride=" in rest:
        found.rejected["EVRF011 stride and input dilation"] += 1
    else:
        found.noted["transposed convolution"] += 1


def _dtype(result: str) -> str:
    return result.lstrip("(").split("[")[0]
