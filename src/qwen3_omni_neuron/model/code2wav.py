"""Vocoder: frames of 16 codes in, 24 kHz samples out."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import Code2WavConfig
from qwen3_omni_neuron.model.layers import FeedForward, RmsNorm, cut, widen
from qwen3_omni_neuron.model.rotary import Rotary, Rotation, apply_rotary

UNIT_DILATIONS = (1, 3, 9)

State = tuple[Tensor, ...]
"""Batch-first state of streams between chunks; no views of a chunk's tensors.

In the order of the layers:
- int64 [streams], number of decoded frames;
- each attention layer's last sliding_window - 1 (71) keys, rotary embedding applied, then as many
  values, each [streams, kv_heads, 71, head_dim]; the last min(71, decoded frames) are valid;
- each causal convolution's last (kernel - 1) * dilation inputs and, for a transposed convolution
  whose kernel is two strides, its last input: [streams, channels, inputs].
"""


Transposed = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""Transposed convolution: (x [streams, into, T], weight [into, out, kernel], bias, stride) ->
[streams, out, stride * T + stride - kernel], with kernel - stride samples trimmed on both sides.
"""


def transposed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Compute a transposed convolution by torch; see Transposed."""
    trimmed = weight.shape[2] - stride
    return F.conv_transpose1d(x, weight, bias, stride=stride, padding=trimmed)


class History:
    """Layers' earlier inputs for one chunk, and their state for the next.

    Each layer consumes its part in turn. new_state: complete after every layer's call.
    """

    def __init__(
        self,
        past: Iterable[Tensor] | None,
        starts: Tensor | None = None,
        transposed: Transposed = transposed_convolution,
    ):
        """Begin a chunk. past: the previous chunk's `new_state`, None for a first chunk.

        starts: bool [streams], streams that start with this chunk, with a past of zeros; None:
        none. transposed: computes the transposed convolutions.
        """
        self.transposed = transposed
        self._past = None if past is None else iter(past)
        self._starts, self._late = starts, 0
        self.new_state: list[Tensor] = []

    def extend(self, x: Tensor, length: int, pad: bool = True) -> Tensor:
        """Return x with its previous `length` entries prepended along axis 2.

        x: [streams, rows, T, ...]. A stream starts with zeros; without `pad`, with x unchanged.
        """
        if self._past is not None:
            parts = [next(self._past), x]
            if self._starts is not None and self._late and pad:
                early, rest = cut(x, 2, self._late)
                parts[1:] = early.masked_fill(self._starts[:, None, None], 0), rest
            x = torch.cat(parts, 2)
        elif pad:
            zeros = x.new_zeros((*x.shape[:2], length, *x.shape[3:]))
            x = torch.cat((zeros, x), 2)
        # A view would keep x in memory until the next chunk.
        self.new_state.append(x[:, :, -length:].clone())
        return x

    def upsample(self, stride: int, reach: int) -> None:
        """Record that a layer outputs `stride` entries per input.

        reach: earlier inputs that it needs, missing at a stream's start.
        """
        self._late = stride * (self._late + reach)


class Code2Wav(nn.Module):
    """Code embeddings, a sliding-window transformer, and an upsampling convolution stack.

    Source: transformers Qwen3OmniMoeCode2Wav.forward. Chunks give one forward's samples; the
    reference's `chunked_decode` loses latency_samples at every chunk boundary.
    """

    offsets: Tensor

    def __init__(self, c: Code2WavConfig):
        super().__init__()
        self.config = c
        self.latency_samples = c.latency_samples
        self.embedding = nn.Embedding(c.codebook_size * c.code_groups, c.hidden_size)
        offsets = torch.arange(c.code_groups, device="cpu")[:, None] * c.codebook_size
        self.register_buffer("offsets", offsets, persistent=False)
        self.rotary = Rotary(c.rope, c.head_dim)
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
        return self.start(codes)[0]

    def start(self, codes: Tensor) -> tuple[Tensor, State]:
        """Decode streams' first chunk: samples of `forward`, and the state for `step`."""
        return self._advance(codes, torch.zeros_like(codes[:, 0, 0]), History(None))

    def step(
        self,
        codes: Tensor,
        state: State,
        starts: Tensor | None = None,
        transposed: Transposed = transposed_convolution,
    ) -> tuple[Tensor, State]:
        """Decode the next chunk of streams, each at its own position.

        starts, transposed: see History. Returns samples [streams, T * frame_samples], whose first
        latency_samples are invalid at a stream's start, and the new state; `state` is not changed.
        """
        position, *past = state
        return self._advance(codes, position, History(past, starts, transposed))

    def _advance(self, codes: Tensor, position: Tensor, history: History) -> tuple[Tensor, State]:
        samples = self.wave(self.transform(codes, position, history), history)
        return samples, (position + codes.shape[2], *history.new_state)

    def transform(self, codes: Tensor, position: Tensor, history: History) -> Tensor:
        """Run everything before the decoder blocks. Returns the input of `wave`.

        position: int64 [streams], number of earlier frames.
        """
        frames = codes.shape[2]
        x = self.embedding(codes + self.offsets).mean(1)  # [streams, T, hidden]
        frame = torch.arange(frames, dtype=position.dtype, device=codes.device)
        positions = position[:, None] + frame
        rotation = self.rotary.at(positions.float())
        mask = window_mask(position, frames, self.config.sliding_window)
        for layer in self.layers:
            x = layer(x, rotation, mask, history)
        x = self.norm(x).transpose(1, 2)  # [streams, hidden, T]
        for stage in self.upsample:
            x = stage(x, history)
        return self.conv_in(x, history)

    def wave(self, x: Tensor, history: History) -> Tensor:
        """Run the decoder blocks, most of the work.

        x: [streams, decoder_dim, T * frame_inputs]. Returns samples [streams, T * frame_samples],
        latency_samples fewer for a first chunk.
        """
        for block in self.blocks:
            x = block(x, history)
        return self.conv_out(self.act_out(x), history).squeeze(1).clamp(-1, 1)


def window_mask(position: Tensor, frames: int, window: int) -> Tensor:
    """Return the keys that each frame of a chunk sees: bool [streams, 1, T, window - 1 + T].

    position: int64 [streams], number of earlier frames. Frame i sees keys i to i + window - 1, its
    own. At position p only the last p of the window - 1 earlier keys are valid.
    """
    key = torch.arange(window - 1 + frames, dtype=position.dtype, device=position.device)
    first = key[:frames, None]  # [T, 1]
    filled = (window - 1 - position)[:, None, None, None]  # index of the first filled key
    return (key >= torch.maximum(first, filled)) & (key < first + window)


class VocoderLayer(nn.Module):
    """Sliding-window attention and feed-forward, each scaled per channel.

    Source: transformers Qwen3OmniMoeCode2WavTransformerLayer.forward.
    """

    def __init__(self, c: Code2WavConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.reach = c.sliding_window - 1
        self.attention_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.qkv = nn.Linear(c.hidden_size, width, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.attention_scale = nn.Parameter(torch.ones(c.hidden_size))
        self.ffn_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.ffn = FeedForward(c.hidden_size, c.ffn_width)
        self.ffn_scale = nn.Parameter(torch.ones(c.hidden_size))

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, history: History) -> Tensor:
        """Apply the layer to x [streams, T, hidden].

        rotation: [streams, T, 1, head_dim]; mask: see window_mask.
        """
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (-1, self.head_dim))
        qk, v = cut(qkv, 2, self.heads + self.kv_heads)
        qk = apply_rotary(widen(qk), rotation).to(x.dtype)
        q, k = cut(qk, 2, self.heads)
        # [streams, T, heads, head_dim] -> [streams, heads, T, head_dim]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = history.extend(k, self.reach), history.extend(v, self.reach)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + self.attention_scale * self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.ffn_scale * self.ffn(self.ffn_norm(x))


class Upsample(nn.Module):
    """Transposed convolution, then a ConvNeXt block.

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

    def forward(self, x: Tensor, history: History) -> Tensor:
        """Upsample x [streams, width, T] to [streams, width, ratio * T]."""
        x = self.conv(x, history)
        y = self.norm(self.depthwise(x, history).transpose(1, 2))
        y = self.scale * self.fc2(F.gelu(self.fc1(y)))
        return x + y.transpose(1, 2)


class Snake(nn.Module):
    """Activation x + sin(a x)^2 / b, with a = exp(alpha) and b = exp(beta) + 1e-9.

    The parameters are a and 1 / b, computed once at load.
    Source: transformers SnakeBeta.forward.
    """

    def __init__(self, width: int):
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(width, 1))
        self.inverse_magnitude = nn.Parameter(torch.ones(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x [streams, width, T]."""
        return x + torch.sin(x * self.frequency).square() * self.inverse_magnitude


class ResidualUnit(nn.Module):
    """Residual of a dilated and a pointwise convolution, each after a Snake.

    Source: transformers Qwen3OmniMoeCode2WavDecoderResidualUnit.forward.
    """

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.act1 = Snake(width)
        self.conv1 = CausalConv(width, width, 7, dilation)
        self.act2 = Snake(width)
        self.conv2 = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor, history: History) -> Tensor:
        """Apply the unit to x [streams, width, T]."""
        return x + self.conv2(self.act2(self.conv1(self.act1(x), history)))


class DecoderBlock(nn.Module):
    """Snake, upsampling, three residual units.

    Source: transformers Qwen3OmniMoeCode2WavDecoderBlock.forward.
    """

    def __init__(self, into: int, out: int, rate: int):
        super().__init__()
        self.act = Snake(into)
        self.upsample = TransposedConv(into, out, 2 * rate, rate)
        self.units = nn.ModuleList(ResidualUnit(out, d) for d in UNIT_DILATIONS)

    def forward(self, x: Tensor, history: History) -> Tensor:
        """Upsample x [streams, into, T] to [streams, out, rate * T].

        A first chunk gives rate * (T - 1).
        """
        x = self.upsample(self.act(x), history)
        for unit in self.units:
            x = unit(x, history)
        return x


class CausalConv(nn.Conv1d):
    """Convolution over current and earlier inputs: [streams, channels, T] -> same T.

    reach: number of earlier inputs of an output.
    Source: transformers Qwen3OmniMoeCausalConvNet.forward, stride 1.
    """

    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(into, out, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        """Convolve x [streams, into, T] to [streams, out, T]."""
        return super().forward(history.extend(x, self.reach))


class TransposedConv(nn.ConvTranspose1d):
    """Upsampling by `stride`; trims kernel - stride samples on both sides, like the reference.

    A sample depends on as many inputs as the kernel has strides, one or two. With two, a stream's
    first chunk gives stride * (T - 1) samples, each later one, after the previous chunk's last
    input, stride * T. This look-ahead causes latency_samples.
    reach: number of earlier inputs in the state, 0 or 1.
    Source: transformers Qwen3OmniMoeCausalTransConvNet.forward.
    """

    def __init__(self, into: int, out: int, kernel: int, stride: int):
        super().__init__(into, out, kernel, stride=stride)
        self.reach = kernel // stride - 1

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        """Upsample x [streams, into, T]; see the class for the result's length."""
        if self.reach:
            x = history.extend(x, self.reach, pad=False)
        (stride,) = self.stride
        history.upsample(stride, self.reach)
        return history.transposed(x, self.weight, self.bias, stride)
