"""The vocoder: frames of 16 codes in, 24 kHz samples out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.config import Code2WavConfig
from qwen3_omni_neuron.model.feed_forward import FeedForward
from qwen3_omni_neuron.model.linear import Linear
from qwen3_omni_neuron.model.norm import RmsNorm, cast, widen
from qwen3_omni_neuron.model.rotary import Rotary, Rotation, rotate

UNIT_DILATIONS = (1, 3, 9)
FEW_CHANNELS = 4


class Code2Wav(nn.Module):
    """Code embeddings, a sliding-window transformer, and an upsampling convolution stack.

    Source: transformers Qwen3OmniMoeCode2Wav.forward: one forward over all frames, not
    `chunked_decode`, which loses latency_samples at every chunk boundary.
    """

    offsets: Tensor

    def __init__(self, c: Code2WavConfig):
        super().__init__()
        self.config = c
        self.latency_samples = c.latency_samples
        self.embedding = nn.Embedding(c.codebook_size * c.code_groups, c.hidden_size)
        offsets = torch.arange(c.code_groups, device="cpu")[:, None] * c.codebook_size
        self.register_buffer("offsets", offsets, persistent=False)
        self.rotary = Rotary(c.rope, c.head_dim, c.max_positions)
        self.layers = nn.ModuleList(VocoderLayer(c) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.upsample = nn.ModuleList(Upsample(c.hidden_size, r) for r in c.upsampling_ratios)
        self.conv_in = CausalConv(c.hidden_size, c.decoder_dim, 7)
        widths = [c.decoder_dim // 2**i for i in range(len(c.upsample_rates) + 1)]
        self.blocks = nn.ModuleList(
            DecoderBlock(into, out, rate)
            for into, out, rate in zip(widths, widths[1:], c.upsample_rates, strict=False)
        )
        self.act_out = Snake(widths[-1])
        self.conv_out = CausalConv(widths[-1], 1, 7)

    def forward(self, codes: Tensor) -> Tensor:
        """Decode whole streams.

        codes: int64 [streams, code_groups, T]. Returns samples [streams, T * frame_samples -
        latency_samples] in [-1, 1].
        """
        x = self.embedding(codes + self.offsets).mean(1)  # [streams, T, hidden]
        frames = x.shape[1]
        rotation = self.rotary.span(0, frames)
        mask = window_mask(frames, self.config.sliding_window)
        for layer in self.layers:
            x = layer(x, rotation, mask)
        x = self.norm(x).transpose(1, 2)  # [streams, hidden, T]
        for stage in self.upsample:
            x = stage(x)
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x)
        return self.conv_out(self.act_out(x)).squeeze(1).clamp(-1, 1)


def window_mask(frames: int, window: int) -> Tensor:
    """bool [T, T]: frame i sees frames i - window + 1 to i."""
    return torch.ones(frames, frames, dtype=torch.bool).tril().triu(1 - window)


class VocoderLayer(nn.Module):
    """Sliding-window attention and feed-forward, each scaled per channel.

    Source: transformers Qwen3OmniMoeCode2WavTransformerLayer.forward.
    """

    def __init__(self, c: Code2WavConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.attention_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.qkv = Linear(c.hidden_size, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.out = Linear(c.heads * c.head_dim, c.hidden_size)
        self.attention_scale = nn.Parameter(torch.ones(c.hidden_size))
        self.ffn_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.ffn = FeedForward(c.hidden_size, c.ffn_width)
        self.ffn_scale = nn.Parameter(torch.ones(c.hidden_size))

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor) -> Tensor:
        """x: [streams, T, hidden]; mask: bool, broadcast to [streams, heads, T, T]."""
        streams, frames, _ = x.shape
        rows = x.flatten(0, 1)  # [streams * T, hidden]
        qkv = self.qkv(self.attention_norm(rows)).view(streams, frames, -1, self.head_dim)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 2)
        qk = cast(rotate(widen(qk), rotation), x.dtype)
        q, k = qk.split((self.heads, self.kv_heads), 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [streams, heads, T, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        mixed = mixed.transpose(1, 2).reshape(streams * frames, -1)
        rows = rows + self.attention_scale * self.out(mixed)
        rows = rows + self.ffn_scale * self.ffn(self.ffn_norm(rows))
        return rows.view_as(x)


class CausalConv(nn.Conv1d):
    """A convolution that sees its input and what came before. [streams, channels, T] -> same T.

    Source: transformers Qwen3OmniMoeCausalConvNet.forward, stride 1.
    """

    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(into, out, kernel, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (self.history, 0))
        if self.out_channels > FEW_CHANNELS:
            return super().forward(x)
        return self._by_tap(x, x.shape[2] - self.history)

    def _by_tap(self, x: Tensor, length: int) -> Tensor:
        """All taps as one matrix product, then their shifted sum: for few output channels, where
        a convolution kernel has little to work on, several times faster."""
        out, into, taps = self.weight.shape
        by_tap = self.weight.permute(2, 0, 1).reshape(taps * out, into)
        products = torch.matmul(by_tap, x).unflatten(1, (taps, out))
        assert self.bias is not None
        total = self.bias[:, None] + products[:, 0, :, :length]
        for tap in range(1, taps):
            start = tap * self.dilation[0]
            total += products[:, tap, :, start : start + length]
        return total


class PointwiseConv(nn.Conv1d):
    """A convolution of kernel 1 as the matrix product that it is: much the faster on a CPU."""

    def __init__(self, into: int, out: int):
        super().__init__(into, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [streams, into, T] -> [streams, out, T]."""
        assert self.bias is not None
        return torch.matmul(self.weight[:, :, 0], x).add_(self.bias[:, None])


class TransposedConv(nn.ConvTranspose1d):
    """Upsampling by `stride`, kernel - stride samples trimmed on both sides as the reference does.

    T in give stride * T - (kernel - stride) out: with a kernel of one stride all of them, with
    two strides one stride fewer, the look-ahead that makes code2wav late.
    Source: transformers Qwen3OmniMoeCausalTransConvNet.forward.
    """

    def __init__(self, into: int, out: int, kernel: int, stride: int):
        super().__init__(into, out, kernel, stride=stride, padding=kernel - stride)


class Upsample(nn.Module):
    """A transposed convolution, then a ConvNeXt block.

    Source: transformers Qwen3OmniMoeConvNeXtBlock.forward.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.conv = TransposedConv(width, width, ratio, ratio)
        self.depthwise = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [streams, width, T] -> [streams, width, ratio * T]."""
        x = self.conv(x)
        y = self.norm(self.depthwise(x).transpose(1, 2))
        y = self.scale * self.fc2(F.gelu(self.fc1(y)))
        return x + y.transpose(1, 2)


class Snake(nn.Module):
    """x + sin(a x)^2 / b, with a = exp(alpha) and 1 / b = 1 / (exp(beta) + 1e-9) as stored.

    The exponentials are taken once, when the weights are loaded.
    Source: transformers SnakeBeta.forward.
    """

    def __init__(self, width: int):
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(width, 1))
        self.inverse_magnitude = nn.Parameter(torch.ones(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [streams, width, T]."""
        return torch.addcmul(x, (x * self.frequency).sin_().square_(), self.inverse_magnitude)


class ResidualUnit(nn.Module):
    """Source: transformers Qwen3OmniMoeCode2WavDecoderResidualUnit.forward."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.act1 = Snake(width)
        self.conv1 = CausalConv(width, width, 7, dilation)
        self.act2 = Snake(width)
        self.conv2 = PointwiseConv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class DecoderBlock(nn.Module):
    """Snake, upsampling, three residual units.

    Source: transformers Qwen3OmniMoeCode2WavDecoderBlock.forward.
    """

    def __init__(self, into: int, out: int, rate: int):
        super().__init__()
        self.act = Snake(into)
        self.upsample = TransposedConv(into, out, 2 * rate, rate)
        self.units = nn.ModuleList(ResidualUnit(out, d) for d in UNIT_DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [streams, into, T] -> [streams, out, rate * (T - 1)]."""
        x = self.upsample(self.act(x))
        for unit in self.units:
            x = unit(x)
        return x
