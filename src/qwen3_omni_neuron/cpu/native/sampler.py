"""Sampling of text tokens and code 0, in C except for the noise."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import Library, check, check_dense
from qwen3_omni_neuron.engines.sampling import Sampler, draw

GREEDY: int = ffi.integer_const("GREEDY")
MOST_HELD = 1 << 16  # upper bound of logits per call with the interpreter lock: about 0.1 ms
ADDRESS = ffi.typeof("intptr_t")


class NativeSampler:
    """`engines.sampling.sample_ids`, with one C call for all sequences' candidates.

    An id differs from numpy's only if two logits at the edge of top-k or top-p are within float32's
    rounding error. A call with few logits keeps the interpreter lock, because getting it back would
    take longer: by ctypes, since cffi always releases it.
    """

    def __init__(self, library: Library):
        function, types = library.remaining_rows, ffi.typeof(library.remaining_rows).args
        arguments = [ctypes.c_void_p if t.kind == "pointer" else ctypes.c_int64 for t in types]
        self._run, self._run_holding = (
            prototype(ctypes.c_int, *arguments)(int(ffi.cast(ADDRESS, function)))
            for prototype in (ctypes.CFUNCTYPE, ctypes.PYFUNCTYPE)
        )

    def __call__(self, samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> list[int]:
        """Sample the next id of each sequence."""
        count, vocab = len(samplers), samplers[0].vocab_size
        rows = [row if row.dtype is torch.float32 else row.float() for row in logits]
        for row in rows:
            check_dense(row, torch.float32, 1, vocab)
        how = [(s.prepared or _prepare(s))[1] for s in samplers]
        pointers, counts = ctypes.c_void_p * count, (ctypes.c_int64 * count)()
        masks = None
        if any(sampler.mask is not None for sampler in samplers):
            masks = pointers(*(None if s.mask is None else s.mask.ctypes.data for s in samplers))
        indices, scores = np.empty(count * vocab, np.int64), np.empty(count * vocab, np.float32)
        run = self._run_holding if count * vocab <= MOST_HELD else self._run
        given = pointers(*(row.data_ptr() for row in rows))
        found = indices.ctypes.data, scores.ctypes.data
        check(run(count, given, vocab, pointers(*how), masks, counts, *found))
        ends = list(accumulate(counts))
        each = [slice(end - held, end) for held, end in zip(counts, ends, strict=True)]
        return draw(samplers, [(indices[row], scores[row]) for row in each])


def _prepare(sampler: Sampler) -> tuple[Any, int]:
    """Create a sampler's struct, which lives as long as the sampler; return it and its address."""
    params, allowed, penalties = sampler.params, sampler.allowed, sampler.penalties
    counts = sampler.counts
    fields = {
        "allowed": ffi.NULL if allowed is None else ffi.from_buffer("int64_t[]", allowed),
        "penalties": ffi.NULL if penalties is None else ffi.from_buffer("float[]", penalties),
        "counts": ffi.NULL if counts is None else ffi.from_buffer("int32_t[]", counts),
        "count": sampler.vocab_size if allowed is None else len(allowed),
        "top_k": params.top_k if params.do_sample else GREEDY,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "frequency": params.frequency_penalty,
        "presence": params.presence_penalty,
    }
    struct = ffi.new("Sampling *", fields)
    sampler.prepared = prepared = struct, int(ffi.cast(ADDRESS, struct))
    return prepared
