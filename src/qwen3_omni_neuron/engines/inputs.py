"""Inputs and outputs of engine calls: padding of chunks, integers as tensors, sampling inputs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.code_predictor import top_p_limits


class NumberTensors:
    """Integers from 0 up to `limit` as tensors int64 [1], views of one tensor made beforehand."""

    def __init__(self, limit: int):
        self._numbers = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        """Return the tensor of one number."""
        return self._numbers[number : number + 1]


def rows_of(batch: Tensor) -> list[Tensor]:
    """Return the rows [1, ...] of a batch, as views.

    Uses numpy if it has the dtype, as `batch_of` does: each torch operation releases Python's
    interpreter lock, for which all stages compete.
    """
    if batch.dtype is torch.bfloat16:
        return list(batch.split(1))
    return [torch.from_numpy(row) for row in batch.numpy()[:, None]]


def batch_of(rows: Sequence[Tensor]) -> Tensor:
    """Join rows [1, ...] to a batch."""
    if len(rows) == 1:
        return rows[0]
    if rows[0].dtype is torch.bfloat16:
        return torch.cat(list(rows))
    return torch.from_numpy(np.concatenate([row.numpy() for row in rows]))


def as_sampled(sampling: Sequence[PredictorSampling], codes: int) -> list[PredictorSampling]:
    """Return frames that are all sampled: a greedy one from the likeliest code alone.

    codes: number of uniforms of a frame.
    """
    none = np.zeros(codes, np.float32)
    return [
        replace(how, uniforms=none, top_k=1) if how.uniforms is None else how for how in sampling
    ]


def sampling_inputs(sampling: Sequence[PredictorSampling]) -> tuple[Tensor, Tensor]:
    """Return a graph's uniforms [n, 15] and top-p limits [n] for frames that are all sampled."""
    uniforms = [frame.uniforms for frame in sampling if frame.uniforms is not None]
    return torch.from_numpy(np.stack(uniforms)), top_p_limits([frame.top_p for frame in sampling])


def pad_chunks(
    codes: Sequence[Tensor], chunk_frames: Sequence[int], any_size: bool = False
) -> Tensor:
    """Pad the chunks of several streams to the smallest compiled size that holds all of them.

    codes: [frames, groups] a stream. chunk_frames: the compiled sizes, ascending. any_size: pad
    them only to the longest chunk. Returns [streams, groups, T], T the size. Raises BucketError for
    a chunk with no frames or too many.
    """
    shortest, longest = min(map(len, codes)), max(map(len, codes))
    if not 1 <= shortest <= longest <= chunk_frames[-1]:
        raise BucketError(
            f"A chunk has 1 to {chunk_frames[-1]} frames, got "
            f"{longest if shortest else shortest}. "
            f"Cut it into chunks of {', '.join(map(str, chunk_frames))} frames."
        )
    bucket = longest if any_size else bucket_of(longest, chunk_frames, "frames")
    # numpy for the reason given in rows_of.
    padded = np.zeros((len(codes), codes[0].shape[1], bucket), np.int64)
    for stream, chunk in zip(padded, codes, strict=True):
        stream[:, : len(chunk)] = chunk.numpy().T
    return torch.from_numpy(padded)


def cut_audio(
    codes: Sequence[Tensor], samples: Tensor, frame_samples: int, latency_samples: int
) -> list[NDArray[np.float32]]:
    """Return the samples of each stream, without those of its padding.

    samples: [streams, T * frame_samples - latency_samples].
    """
    # float() is a torch operation even where it changes nothing: see rows_of.
    rows = (samples if samples.dtype == torch.float32 else samples.float()).numpy()
    return [
        row[: len(chunk) * frame_samples - latency_samples]
        for row, chunk in zip(rows, codes, strict=False)  # a batch may have rows without a stream
    ]
