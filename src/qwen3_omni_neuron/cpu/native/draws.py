"""Draws of text tokens and of code 0 in C."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import Number, Pointer, check, declare_calls, pointer_to
from qwen3_omni_neuron.engines.sampling import Sampler

GREEDY = -1
MOST_HELD = 1 << 16  # most logits of a call that holds the interpreter lock: about 0.1 ms


class _Sampling(ctypes.Structure):
    """Sampling of draw.c."""

    _fields_ = [
        *((name, Pointer) for name in ("allowed", "penalties")),
        *((name, Number) for name in ("count", "top_k")),
        *((name, ctypes.c_float) for name in ("penalty", "temperature", "top_p")),
    ]


STRUCTS = {"Sampling": _Sampling}
CONSTANTS = {"GREEDY": GREEDY}


class NativeDraws:
    """`engines.sampling.sample_ids` in C: one call draws the ids of all sequences.

    An id differs from numpy's only where a draw and a boundary, or two logits at the edge of top-k,
    are as close as a rounding error of float32. A call with few logits holds Python's interpreter
    lock, because getting it back would take longer than the call.
    """

    def __init__(self, library: ctypes.CDLL):
        self._run = library.draw_rows
        holding = ctypes.PyDLL(library._name)
        declare_calls(holding)
        self._run_holding = holding.draw_rows

    def __call__(self, samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> list[int]:
        """Draw the next id of each sequence; see engines.sampling.sample_ids."""
        count, vocab = len(samplers), samplers[0].vocab_size
        rows = [row if row.dtype is torch.float32 else row.float() for row in logits]
        how = [ctypes.addressof(s.prepared or _prepare(s)) for s in samplers]
        uniforms = [s.uniforms(1)[0] if s.params.do_sample else 0.0 for s in samplers]
        ids = (Number * count)()
        run = self._run_holding if count * vocab <= MOST_HELD else self._run
        check(
            run(
                count,
                (Pointer * count)(*(pointer_to(row, torch.float32, 1, vocab) for row in rows)),
                vocab,
                (Pointer * count)(*how),
                (ctypes.c_float * count)(*uniforms),
                ids,
            )
        )
        return list(ids)


def _prepare(sampler: Sampler) -> _Sampling:
    """Make a sampler's struct, which lives as long as the sampler."""
    params, allowed, penalties = sampler.params, sampler.allowed, sampler.penalties
    sampler.prepared = struct = _Sampling(
        allowed=None if allowed is None else allowed.ctypes.data,
        penalties=None if penalties is None else penalties.ctypes.data,
        count=sampler.vocab_size if allowed is None else len(allowed),
        top_k=params.top_k if params.do_sample else GREEDY,
        penalty=params.repetition_penalty,
        temperature=params.temperature,
        top_p=params.top_p,
    )
    return struct
