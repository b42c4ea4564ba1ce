"""Inputs and outputs of engine calls: batches, padding of chunks, sampling of frames."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.noise import noise_of_frame
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.errors import BucketError


def rows_of(batch: Tensor) -> list[Tensor]:
    """Return the rows [1, ...] of a batch, as views.

    By numpy if it has the dtype: torch releases the interpreter lock, for which stages compete.
    """
    if batch.dtype is torch.bfloat16:
        return list(batch.split(1))
    return [torch.from_numpy(row) for row in batch.numpy()[:, None]]


def sampling_arrays(
    sampling: Sequence[PredictorSampling], codes: int, vocab: int
) -> tuple[NDArray[np.float32], list[float], list[int]]:
    """Return noise [n, codes, vocab], top_p and top_k to sample all frames in one call.

    A greedy frame gets top_k 1 and no noise, hence the first of its likeliest codes.
    """
    noise = np.zeros((len(sampling), codes, vocab), np.float32)
    for row, frame in zip(noise, sampling, strict=True):
        if frame.noise is not None:
            row[:] = noise_of_frame(frame.noise, codes, vocab)
    top_k = [1 if frame.noise is None else frame.top_k for frame in sampling]
    return noise, [frame.top_p for frame in sampling], top_k


def pad_chunks(
    codes: Sequence[Tensor], chunk_frames: Sequence[int], any_size: bool = False
) -> Tensor:
    """Pad streams' chunks [frames, groups] to the smallest compiled size that fits.

    chunk_frames: compiled sizes, ascending. any_size: pad only to the longest chunk. Returns
    [streams, groups, T]. Raises BucketError for a chunk with no frames or too many.
    """
    shortest, longest = min(map(len, codes)), max(map(len, codes))
    if not 1 <= shortest <= longest <= chunk_frames[-1]:
        raise BucketError(
            f"A chunk has 1 to {chunk_frames[-1]} frames, got "
            f"{longest if shortest else shortest}. "
            f"Cut it into chunks of {', '.join(map(str, chunk_frames))} frames."
        )
    bucket = longest if any_size else bucket_of(longest, chunk_frames, "frames")
    # numpy: see rows_of.
    padded = np.zeros((len(codes), codes[0].shape[1], bucket), np.int64)
    for stream, chunk in zip(padded, codes, strict=True):
        stream[:, : len(chunk)] = chunk.numpy().T
    return torch.from_numpy(padded)


def cut_audio(
    codes: Sequence[Tensor], samples: Tensor, frame_samples: int, latency_samples: int
) -> list[NDArray[np.float32]]:
    """Return each stream's samples, without padding.

    samples: [streams, T * frame_samples - latency_samples].
    """
    # float() is a torch operation even without effect: see rows_of.
    rows = (samples if samples.dtype == torch.float32 else samples.float()).numpy()
    return [
        row[: len(chunk) * frame_samples - latency_samples]
        for row, chunk in zip(rows, codes, strict=False)  # a batch may have rows without a stream
    ]
