"""The audio encoder: mel frames in, one thinker row every 80 ms out.

A clip is cut into chunks of 100 mel frames (1 s, 13 tokens); 8 chunks are a window (8 s, 104
tokens). Attention runs inside a window and never across clips, so windows are rows of one batch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import AudioEncoderConfig


class AudioEncoder(nn.Module):
    """Source: transformers (5.x) Qwen3OmniMoeAudioEncoder.forward."""

    positions: Tensor

    def __init__(self, c: AudioEncoderConfig):
        super().__init__()
        self.config = c
        channels, mels = c.conv_channels, c.mel_bins
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        for _ in range(3):
            mels = (mels + 1) // 2
        self.conv_out = nn.Linear(channels * mels, c.hidden_size, bias=False)
        self.register_buffer("positions", _sinusoids(c), persistent=False)
        self.layers = nn.ModuleList(AudioEncoderLayer(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.fc1 = nn.Linear(c.hidden_size, c.hidden_size)
        self.fc2 = nn.Linear(c.hidden_size, c.output_size)

    def forward(self, mel: Tensor, valid: Tensor, chunk_width: int | Tensor) -> Tensor:
        """Encode windows, each on its own.

        mel: [windows, mel_bins, 800], zeros after a window's end. valid: bool [windows, 104],
        which tokens are real. chunk_width: mel frames that the reference would pad the chunks
        to: those of the longest, 100 unless every clip is shorter than 1 s; int64 [1] where a
        graph is to hold for every width. Returns rows [windows, 104, output_size]; those of tokens
        that are not real mean nothing.
        """
        c = self.config
        # [windows, mels, 800] -> [windows * 8, 1, mels, 100]
        chunks = mel.unflatten(2, (-1, c.chunk_mel_frames)).transpose(1, 2).flatten(0, 1)
        x = self._stem(chunks.unsqueeze(1), chunk_width).unflatten(0, (len(mel), -1)).flatten(1, 2)
        mask = valid[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.fc2(F.gelu(self.fc1(self.norm(x))))

    def _stem(self, chunks: Tensor, width: int | Tensor) -> Tensor:
        """[chunks, 1, mels, 100] -> [chunks, 13, hidden], position inside the chunk added."""
        x = chunks
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.gelu(conv(x))
            # Beyond the width the reference has nothing, and we a bias that the next convolution
            # would see: a clip of 41 frames ends at 21, then 11, so the kernel reaches one over.
            width = (width + 1) // 2
            x = _silence_beyond(x, width)
        x = self.conv_out(x.permute(0, 3, 1, 2).flatten(2))
        return x + self.positions[: x.shape[1]].to(x.dtype)


def _silence_beyond(x: Tensor, width: int | Tensor) -> Tensor:
    """x [..., T] with zeros from `width` on."""
    if isinstance(width, Tensor):
        return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= width, 0)
    return F.pad(x[..., :width], (0, x.shape[-1] - width)) if width < x.shape[-1] else x


class AudioEncoderLayer(nn.Module):
    """Pre-norm transformer layer. Source: transformers Qwen3OmniMoeAudioEncoderLayer.forward."""

    def __init__(self, c: AudioEncoderConfig):
        super().__init__()
        self.heads = c.heads
        self.attention_norm = nn.LayerNorm(c.hidden_size)
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.out = nn.Linear(c.hidden_size, c.hidden_size)
        self.ffn_norm = nn.LayerNorm(c.hidden_size)
        self.fc1 = nn.Linear(c.hidden_size, c.ffn_width)
        self.fc2 = nn.Linear(c.ffn_width, c.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [windows, tokens, hidden]; mask: bool [windows, 1, 1, tokens], real tokens."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [windows, heads, tokens, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))


class WindowBatch(NamedTuple):
    """Some windows of a request, as `AudioEncoder.forward` takes them.

    mel: [windows, mel_bins, 800]. valid: bool [windows, 104]. chunk_width: the request's.
    """

    mel: Tensor
    valid: Tensor
    chunk_width: int


def window_batches(
    mel: Sequence[Tensor], c: AudioEncoderConfig, most: int
) -> Iterator[WindowBatch]:
    """Cut the clips of one request into windows of equal shape, at most `most` a batch.

    mel: one [mel_bins, frames] a clip. The valid tokens, batch after batch, are the clips' tokens
    in order. One batch at a time is padded, so that an hour does not lie in memory twice.
    """
    chunk_width = min(c.chunk_mel_frames, max(clip.shape[1] for clip in mel))
    windows = chain.from_iterable(clip.split(c.window_mel_frames, 1) for clip in mel)
    while some := list(islice(windows, most)):
        padded = [F.pad(window, (0, c.window_mel_frames - window.shape[1])) for window in some]
        tokens = torch.tensor([c.tokens(window.shape[1]) for window in some])
        valid = torch.arange(c.window_tokens) < tokens[:, None]
        yield WindowBatch(torch.stack(padded), valid, chunk_width)


def _sinusoids(c: AudioEncoderConfig) -> Tensor:
    """Position embedding, float32 [max_positions, hidden]: sines, then cosines."""
    half = c.hidden_size // 2
    step = math.log(10000) / (half - 1)
    frequencies = torch.exp(-step * torch.arange(half, dtype=torch.float32, device="cpu"))
    places = torch.arange(c.max_positions, dtype=torch.float32, device="cpu")
    angles = places[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1)
