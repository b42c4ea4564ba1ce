"""The audio encoder on the CPU: the clips of a prompt, a few windows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, window_batches

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
