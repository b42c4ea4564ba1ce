"""Chunks of frames, padded to a compiled size, and their sound, cut to what was asked for."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.errors import BucketError


def pad_chunks(codes: Sequence[Tensor], chunk_frames: Sequence[int]) -> Tensor:
    """[frames, groups] a stream -> [streams, groups, T], T the smallest compiled size that holds
    all.

    chunk_frames: ascending. Raises BucketError for a chunk of no frames or of too many.
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
    return torch.stack(padded).transpose(1, 2)


def cut_sound(
    codes: Sequence[Tensor], samples: Tensor, frame_samples: int, late: int
) -> list[NDArray[np.float32]]:
    """samples [streams, T * frame_samples - late] -> each stream's own, without its padding's."""
    rows = samples.float().numpy()
    return [
        row[: len(chunk) * frame_samples - late] for row, chunk in zip(rows, codes, strict=False)
    ]
