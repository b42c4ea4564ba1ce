"""Audio encoder: mel frames in, one thinker row every 80 ms out.

A clip is cut into chunks of 100 mel frames (1 s, 13 tokens); 8 chunks are a window (8 s, 104
tokens). Attention stays within a window, so windows are rows of one batch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import AudioEncoderConfig
from qwen3_omni_neuron.model.layers import Attend


class AudioEncoder(nn.Module):
    """Convolutions over 1 s chunks, then a transformer over 8 s windows.

    Source: transformers (5.x) Qwen3OmniMoeAudioEncoder.forward.
    """

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

    def forward(
        self, mel: Tensor, valid: Tensor, chunk_width: int | Tensor, attend: Attend | None = None
    ) -> Tensor:
        """Encode independent windows.

        mel: [windows, mel_bins, 100 * chunks], zeros after a window's end; up to 8 chunks.
        valid: bool [windows, 13 * chunks], True for real tokens.
        chunk_width: mel frames to which the reference pads a request's chunks: the longest one's,
        100 unless every clip is shorter than 1 s. int64 [1] in a graph for every width.
        attend: replaces the layers' own.
        Returns rows [windows, 13 * chunks, output_size]; ignore rows of invalid tokens.
        """
        c = self.config
        # [windows, mels, 100 * chunks] -> [windows * chunks, mels, 100]
        chunks = mel.unflatten(2, (-1, c.chunk_mel_frames)).transpose(1, 2).flatten(0, 1)
        return self.transform(self.convolve(chunks, chunk_width), valid, attend)

    def convolve(self, chunks: Tensor, width: int | Tensor) -> Tensor:
        """Apply the convolutions to independent chunks.

        chunks: [chunks, mels, 100]. width: chunk_width of `forward`.
        Returns [chunks, 13, channels * mels / 8].
        """
        x = chunks.unsqueeze(1)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.gelu(conv(x))
            # The reference's tensor ends at `width`. Ours continues with the bias, which the next
            # kernel would read: 41 frames give 21 columns, then 11.
            width = (width + 1) // 2
            x = _zero_from(x, width)
        return x.permute(0, 3, 1, 2).flatten(2)

    def transform(self, convolved: Tensor, valid: Tensor, attend: Attend | None = None) -> Tensor:
        """Apply the transformer to windows' outputs of `convolve`.

        convolved: [windows * chunks, 13, channels * mels / 8]. valid: bool [windows, 13 * chunks].
        Returns rows as `forward` does.
        """
        x = self.conv_out(convolved)
        x = x + self.positions[: x.shape[1]].to(x.dtype)
        x = x.unflatten(0, (len(valid), -1)).flatten(1, 2)
        mask = valid[:, None, None, :]
        others = () if attend is None else (attend,)
        for layer in self.layers:
            x = layer(x, mask, *others)
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


def _zero_from(x: Tensor, width: int | Tensor) -> Tensor:
    if isinstance(width, Tensor):
        columns = torch.arange(x.shape[-1], dtype=width.dtype, device=x.device)
        return x.masked_fill(columns >= width, 0)
    return F.pad(x[..., :width], (0, x.shape[-1] - width)) if width < x.shape[-1] else x


class AudioEncoderLayer(nn.Module):
    """Pre-norm transformer layer.

    Source: transformers Qwen3OmniMoeAudioEncoderLayer.forward.
    """

    def __init__(self, c: AudioEncoderConfig):
        super().__init__()
        self.heads = c.heads
        self.attention_norm = nn.LayerNorm(c.hidden_size)
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.out = nn.Linear(c.hidden_size, c.hidden_size)
        self.ffn_norm = nn.LayerNorm(c.hidden_size)
        self.fc1 = nn.Linear(c.hidden_size, c.ffn_width)
        self.fc2 = nn.Linear(c.ffn_width, c.hidden_size)

    def forward(
        self, x: Tensor, mask: Tensor, attend: Attend = F.scaled_dot_product_attention
    ) -> Tensor:
        """Apply the layer to x [windows, tokens, hidden].

        mask: bool [windows, 1, 1, tokens], True for real tokens.
        """
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [windows, heads, tokens, head_dim]
        mixed = attend(q, k, v, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))


class WindowBatch(NamedTuple):
    """Inputs of one `AudioEncoder.forward`: some windows of a request."""

    mel: Tensor
    valid: Tensor
    chunk_width: int


def window_batches(
    mel: Sequence[Tensor],
    c: AudioEncoderConfig,
    max_windows: int,
    whole: bool = True,
    first: int = 0,
    stop: int | None = None,
) -> Iterator[WindowBatch]:
    """Cut a request's clips into windows of equal shape, at most `max_windows` per batch.

    mel: [mel_bins, frames] per clip. whole: every window has 8 chunks; else a batch has as many
    chunks as its longest window. first, stop: yield only windows [first, stop). The batches' valid
    tokens are the clips' tokens in order.
    """
    chunk_width = min(c.chunk_mel_frames, max(clip.shape[1] for clip in mel))
    windows = islice(_windows(mel, c), first, stop)
    while some := list(islice(windows, max_windows)):
        frames = [window.shape[1] for window in some]
        longest = c.window_mel_frames if whole else max(frames)
        width = -(-longest // c.chunk_mel_frames) * c.chunk_mel_frames
        padded = [F.pad(window, (0, width - window.shape[1])) for window in some]
        tokens = torch.tensor([c.tokens(count) for count in frames])
        valid = torch.arange(c.tokens(width)) < tokens[:, None]
        yield WindowBatch(torch.stack(padded), valid, chunk_width)


def tokens_of_windows(mel: Sequence[Tensor], c: AudioEncoderConfig) -> list[int]:
    """Return each window's number of tokens."""
    return [c.tokens(window.shape[1]) for window in _windows(mel, c)]


def _windows(mel: Sequence[Tensor], c: AudioEncoderConfig) -> Iterator[Tensor]:
    return chain.from_iterable(clip.split(c.window_mel_frames, 1) for clip in mel)


def _sinusoids(c: AudioEncoderConfig) -> Tensor:
    """Return the position embedding, float32 [max_positions, hidden]: sines, cosines."""
    half = c.hidden_size // 2
    step = math.log(10000) / (half - 1)
    frequencies = torch.exp(-step * torch.arange(half, dtype=torch.float32, device="cpu"))
    places = torch.arange(c.max_positions, dtype=torch.float32, device="cpu")
    angles = places[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1)
