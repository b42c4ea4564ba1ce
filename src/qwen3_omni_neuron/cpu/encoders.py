"""The audio encoder on the CPU: the clips of a prompt, a few windows at a time."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.compilation.buckets import bucket_of
from qwen3_omni_neuron.conversation.prompt import Patches
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, window_batches
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, pad_patches, patch_places

# More are no faster (128 s of sound on one core, 1, 4, 8 and 16 at once: 57, 49, 61 and 62 ms with
# the tiny checkpoint, 217, 222, 281 and 340 ms with the small one), and the stem of the released
# size wants 130 MB of float32 for each.
WINDOWS_AT_ONCE = 4


class CpuAudio:
    """Runs model.audio_encoder."""

    def __init__(self, encoder: AudioEncoder):
        self._encoder = encoder

    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        """[tokens, hidden] of all clips, in order. clips: float32 [mel_bins, frames] each."""
        c, dtype = self._encoder.config, self._encoder.fc2.weight.dtype
        tokens = sum(c.tokens(clip.shape[1]) for clip in clips)
        rows = torch.empty(tokens, c.output_size, dtype=dtype)
        end = 0
        for batch in window_batches(clips, c, WINDOWS_AT_ONCE):
            encoded = self._encoder(batch.mel.to(dtype), batch.valid, batch.chunk_width)
            some = encoded[batch.valid]
            rows[end : end + len(some)] = some
            end += len(some)
        return rows


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
