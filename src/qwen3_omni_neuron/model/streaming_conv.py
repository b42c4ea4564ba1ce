"""Convolutions over a stream that comes in chunks, and what is kept from one chunk to the next."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

FEW_CHANNELS = 4


class History:
    """What came before one chunk, and what this chunk leaves for the next one.

    Made for one call and dropped with it. Each layer that looks back takes its part in turn, so
    the order of the parts is the order in which a model calls its layers.
    """

    def __init__(self, past: Iterable[Tensor] | None):
        """past: what the chunk before left, None for the first chunk of a stream."""
        self._past = None if past is None else iter(past)
        self.left: list[Tensor] = []

    def extend(self, x: Tensor, length: int, pad: bool = True) -> Tensor:
        """Put the `length` entries that came before x in front of it, along axis 2.

        x: [streams, rows, T, ...]. At the start of a stream these are zeros or, without `pad`,
        nothing: x is returned as it is.
        """
        if self._past is not None:
            x = torch.cat((next(self._past), x), 2)
        elif pad:
            silence = x.new_zeros((*x.shape[:2], length, *x.shape[3:]))
            x = torch.cat((silence, x), 2)
        # A copy: a view would keep all of x alive as long as the stream.
        self.left.append(x[:, :, -length:].clone())
        return x


class CausalConv(nn.Conv1d):
    """A convolution that sees its input and what came before. [streams, channels, T] -> same T.

    Source: transformers Qwen3OmniMoeCausalConvNet.forward, stride 1.
    """

    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(into, out, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        x = history.extend(x, self.reach)
        return super().forward(x) if self.out_channels > FEW_CHANNELS else self._by_tap(x)

    def _by_tap(self, x: Tensor) -> Tensor:
        """All taps as one matrix product, then their shifted sum: for few output channels, where
        a convolution kernel has little to work on, several times faster."""
        out, into, taps = self.weight.shape
        by_tap = self.weight.permute(2, 0, 1).reshape(taps * out, into)
        products = torch.matmul(by_tap, x).unflatten(1, (taps, out))
        assert self.bias is not None
        total = products[:, -1, :, self.reach :] + self.bias[:, None]
        for tap in range(taps - 1):
            start = tap * self.dilation[0]
            total += products[:, tap, :, start : start - self.reach]
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

    A sample is made of as many inputs as the kernel has strides, one or two. With two, the
    samples between an input and the next wait for the next: the first chunk of a stream gives
    stride * (T - 1) samples, and each later one, with the last input held in front of it,
    stride * T. This look-ahead is what makes code2wav late.
    Source: transformers Qwen3OmniMoeCausalTransConvNet.forward.
    """

    def __init__(self, into: int, out: int, kernel: int, stride: int):
        super().__init__(into, out, kernel, stride=stride, padding=kernel - stride)
        self.reach = kernel // stride - 1

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        return super().forward(history.extend(x, self.reach, pad=False) if self.reach else x)
