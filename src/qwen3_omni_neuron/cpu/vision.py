"""The vision encoder on the CPU: images and videos of a prompt, a few frames at a time."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.buckets import bucket_of
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, pad_patches, patch_places
from qwen3_omni_neuron.prompt import Patches

PATCHES_AT_ONCE = 4096  # bounds what a long video needs beside its rows


class CpuVision:
    """Runs model.vision_encoder. patch_buckets: patch counts that frames are padded to, ascending;
    none: no padding."""

    def __init__(self, encoder: VisionEncoder, patch_buckets: Sequence[int] = ()):
        self._encoder, self._buckets = encoder, patch_buckets

    def encode(self, pictures: Iterable[Patches]) -> Tensor:
        """[1 + deepstack, rows, hidden] of all pictures, in order."""
        encoded = [frames for picture in pictures for frames in self._frames(picture)]
        return torch.cat(encoded, 1)

    def _frames(self, picture: Patches) -> Iterator[Tensor]:
        """[1 + deepstack, rows, hidden] of a few frames, and of the next few."""
        frames, height, width = picture.grid
        c = self._encoder.config
        size = height * width
        bucket = bucket_of(size, self._buckets, "patches in a frame")
        places, grid = patch_places(height, width, c.merge_size), torch.tensor((height, width))
        dtype = self._encoder.patch_embedding.weight.dtype
        for some in picture.values.view(frames, size, -1).split(max(1, PATCHES_AT_ONCE // bucket)):
            patches, padded_places, valid = pad_patches(some.to(dtype), places, bucket)
            rows = self._encoder(patches, padded_places, grid, valid)
            yield rows[:, :, : size // c.merge_size**2].flatten(1, 2)
