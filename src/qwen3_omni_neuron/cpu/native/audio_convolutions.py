"""The audio encoder's convolutions in C."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    Fields,
    Library,
    Weights,
    address_of,
    check,
    empty_floats,
    pointer_to,
)
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder


class NativeAudioConvolutions:
    """`AudioEncoder.convolve` in float32 over float32 or bfloat16 weights, which it packs.

    A chunk's result does not depend on other chunks or the number of threads.
    """

    def __init__(self, encoder: AudioEncoder, library: Library, threads: int):
        c = self._config = encoder.config
        self._run, self._weights = library.convolve_audio, Weights()
        convolutions = (encoder.conv1, encoder.conv2, encoder.conv3)
        fields = {
            "mels": c.mel_bins,
            "times": c.chunk_mel_frames,
            "conv": [self._matrix(conv, library) for conv in convolutions],
            "threads": threads,
        }
        self._described = ffi.new("AudioConvolutions *", fields)

    def __call__(self, chunks: Tensor, width: int) -> Tensor:
        """Convolve chunks; see AudioEncoder.convolve. Raises ValueError for other shapes."""
        c = self._config
        if not 1 <= width <= c.chunk_mel_frames:
            raise ValueError(f"a width is of 1 to {c.chunk_mel_frames} mel frames, got {width}")
        columns = (c.chunk_mel_frames + 7) // 8
        rows = empty_floats(len(chunks), columns, c.conv_channels * ((c.mel_bins + 7) // 8))
        chunks = chunks.contiguous()
        status = self._run(
            self._described,
            len(chunks),
            width,
            pointer_to(chunks, torch.float32, len(chunks), c.mel_bins, c.chunk_mel_frames),
            address_of(rows),
        )
        check(status)
        return rows

    def _matrix(self, conv: nn.Conv2d, library: Library) -> Fields:
        # [out, in, mels, times] -> [out, mels * times * in]: channels are adjacent.
        weight = conv.weight.detach().permute(0, 2, 3, 1).flatten(1)
        assert conv.bias is not None
        bias = self._weights(conv.bias.detach().float(), conv.out_channels)
        return {**self._weights.packed(weight, library), "bias": bias}
