"""The audio and the vision encoder on the CPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, tokens_of_windows, window_batches
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, pad_patches, patch_places
from qwen3_omni_neuron.prompt.media.pixels import Visual

PATCHES_AT_ONCE = 4096  # limits memory for long videos


class CpuAudio:
    """Audio encoder over model.audio_encoder. convolve: replaces AudioEncoder.convolve."""

    def __init__(
        self, encoder: AudioEncoder, convolve: Callable[[Tensor, int], Tensor] | None = None
    ):
        self._encoder, self._dtype = encoder, encoder.norm.weight.dtype
        self._convolve = convolve or encoder.convolve
        # torch prepares its convolutions at their first call.
        with torch.inference_mode():
            self.encode([torch.zeros(encoder.config.mel_bins, encoder.config.chunk_mel_frames)])

    def encode(self, clips: Sequence[Tensor], first: int = 0, stop: int | None = None) -> Tensor:
        """Encode the windows of audio clips one by one."""
        c, dtype = self._encoder.config, self._dtype
        rows = torch.empty(sum(tokens_of_windows(clips, c)[first:stop]), c.output_size, dtype=dtype)
        end = 0
        # In another batch size, or with a longer window, torch adds in another order: a prompt in
        # pieces would differ from the whole prompt in the last bits. Batches are not faster (128 s
        # of audio on one core, 1 and 16 at once: 57 and 62 ms with the tiny checkpoint, 217 and 340
        # ms with the small one), and a released window's convolutions take 130 MB of float32.
        for batch in window_batches(clips, c, 1, whole=False, first=first, stop=stop):
            # [1, mels, 100 * chunks] -> [chunks, mels, 100]
            chunks = batch.mel[0].to(dtype).unflatten(1, (-1, c.chunk_mel_frames)).transpose(0, 1)
            convolved = self._convolve(chunks, batch.chunk_width)
            encoded = self._encoder.transform(convolved, batch.valid)
            valid_rows = encoded[batch.valid]
            rows[end : end + len(valid_rows)] = valid_rows
            end += len(valid_rows)
        return rows


class CpuVision:
    """Vision encoder over model.vision_encoder.

    patch_buckets: patch counts to which frames are padded, ascending; empty: no padding.
    """

    def __init__(self, encoder: VisionEncoder, patch_buckets: Sequence[int] = ()):
        self._encoder, self._buckets = encoder, patch_buckets
        self._dtype = encoder.merger.norm.weight.dtype

    def encode(self, visuals: Iterable[Visual]) -> Tensor:
        """Encode images and videos to [1 + deepstack, rows, hidden], in order."""
        encoded = [frames for visual in visuals for frames in self._encode_frames(visual)]
        return torch.cat(encoded, 1)

    def _encode_frames(self, visual: Visual) -> Iterator[Tensor]:
        frames, height, width = visual.grid
        c = self._encoder.config
        size = height * width
        bucket = bucket_of(size, self._buckets, "patches in a frame")
        places, grid = patch_places(height, width, c.merge_size), torch.tensor((height, width))
        at_once = max(1, PATCHES_AT_ONCE // bucket)
        for first in range(0, frames, at_once):
            some = visual.part(first, first + at_once).patches().to(self._dtype)
            patches, padded_places, valid = pad_patches(some, places, bucket)
            rows = self._encoder(patches, padded_places, grid, valid)
            yield rows[:, :, : size // c.merge_size**2].flatten(1, 2)
