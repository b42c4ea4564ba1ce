"""Limits on what a graph makes its compiler do, by its cost. They hold for every graph."""

import torch

from bench.trn2.cost import Cost

NUMBERS = 50_000  # of activations and state that a graph scatters
ROWS = 16_384  # row numbers that one operation scatters
TARGET_BYTES = 4 * 2**20  # what a scatter may write into, since it may be copied whole
INPUTS = 64
INSTRUCTIONS = 2_500_000  # neuronx-cc takes 5 million (NCC_EBVF030); the count is the least
DESCRIPTORS = 16_800_000  # of all loaded graphs, as a public report of TorchNeuron met it


def faults(cost: Cost) -> list[str]:
    """Return what a graph of this cost has that it must not have, a sentence each."""
    found = [*cost.refused]
    moved = sum(s.numbers for s in cost.scatters if not _is_row_number(s.dtype))
    if moved > NUMBERS:
        found.append(f"scatters: {moved} numbers of activations or state, at most {NUMBERS}")
    for scatter in cost.scatters:
        if _is_row_number(scatter.dtype) and scatter.numbers > ROWS:
            found.append(f"scatter: {scatter.numbers} row numbers, at most {ROWS}")
        if scatter.target_bytes > TARGET_BYTES:
            found.append(f"scatter into {scatter.target_bytes} bytes, at most {TARGET_BYTES}")
    found += [
        f"gather: {gather.moved_bytes:.0f} bytes are moved, all matrices are {gather.stack_bytes}"
        for gather in cost.gathers
        if gather.moved_bytes > gather.stack_bytes
    ]
    if cost.inputs > INPUTS:
        found.append(f"inputs: {cost.inputs}, at most {INPUTS}")
    if cost.instructions > INSTRUCTIONS:
        found.append(f"instructions: {cost.instructions}, at most {INSTRUCTIONS}")
    return found


def _is_row_number(dtype: torch.dtype) -> bool:
    return dtype in (torch.int32, torch.int64)
