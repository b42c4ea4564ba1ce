"""Chunks of codec frames: padded to a compiled size, and their audio without the padding's."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.errors import BucketError


def pad_chunks(codes: Sequence[Tensor], chunk_frames: Sequence[int]) -> Tensor:
    """Pad the chunks of several streams to the smallest compiled size that holds all of them.

    codes: [frames, groups] a stream. chunk_frames: the compiled sizes, ascending.
    Returns [streams, groups, T], T the size. Raises BucketError for a chunk of no frames or of too
    many.
    """
    shortest, longest = min(map(len, codes)), max(map(len, codes))
    if not 1 <= shortest <= longest <= chunk_frames[-1]:
        raise BucketError(
            f"A chunk has 1 to {chunk_frames[-1]} frames, got "
            f"{longest if shortest else shortest}. "
            f"Cut it into chunks of {', '.join(map(str, chunk_frames))} frames."
        )
    bucket = next(size for size in chunk_frames if size >= longest)
    padded = [F.pad(chunk, (0, 0, 0, bucket - len(chunk))) for chunk in codes]
    return torch.stack(padded).transpose(1, 2)  # [streams, T, groups] -> [streams, groups, T]


def cut_audio(
    codes: Sequence[Tensor], samples: Tensor, frame_samples: int, latency_samples: int
) -> list[NDArray[np.float32]]:
    """Return the samples of each stream, without those of its padding.

    samples: [streams, T * frame_samples - latency_samples].
    """
    rows = samples.float().numpy()
    return [
        row[: len(chunk) * frame_samples - latency_samples]
        for row, chunk in zip(rows, codes, strict=False)  # a batch may have rows of no stream
    ]
