"""Convolutions over a stream that comes in chunks, and the inputs they keep between chunks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class History:
    """Earlier inputs of the layers for one chunk, and what they keep for the next chunk.

    Made for one call and dropped with it. Each layer that needs earlier inputs takes its part in
    turn, so the parts are in the order in which a model calls its layers.
    new_state: the parts for the next chunk, complete when every layer was called.
    """

    def __init__(self, past: Iterable[Tensor] | None):
        """Begin a chunk. past: `new_state` of the chunk before, None for the first of a stream."""
        self._past = None if past is None else iter(past)
        self.new_state: list[Tensor] = []

    def extend(self, x: Tensor, length: int, pad: bool = True) -> Tensor:
        """Return x with the `length` entries before it prepended along axis 2.

        x: [streams, rows, T, ...]. At the start of a stream, zeros are prepended; without `pad`, x
        is returned unchanged.
        """
        if self._past is not None:
            x = torch.cat((next(self._past), x), 2)
        elif pad:
            zeros = x.new_zeros((*x.shape[:2], length, *x.shape[3:]))
            x = torch.cat((zeros, x), 2)
        # A copy: a view would keep the memory of all of x until the next chunk.
        self.new_state.append(x[:, :, -length:].clone())
        return x


class CausalConv(nn.Conv1d):
    """Convolution over the current and earlier inputs: [streams, channels, T] -> same T.

    reach: how many earlier inputs an output depends on.
    Source: transformers Qwen3OmniMoeCausalConvNet.forward, stride 1.
    """

    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(into, out, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        """Convolve x [streams, into, T] to [streams, out, T]."""
        return super().forward(history.extend(x, self.reach))


class TransposedConv(nn.ConvTranspose1d):
    """Upsampling by `stride`, kernel - stride samples trimmed on both sides as the reference does.

    A sample depends on as many inputs as the kernel has strides, one or two. With two, the samples
    between two inputs need both: the first chunk of a stream gives stride * (T - 1) samples, and
    each later one, after the last input of the chunk before it, stride * T. This look-ahead causes
    code2wav's latency_samples.
    reach: how many earlier inputs are kept, 0 or 1.
    Source: transformers Qwen3OmniMoeCausalTransConvNet.forward.
    """

    def __init__(self, into: int, out: int, kernel: int, stride: int):
        super().__init__(into, out, kernel, stride=stride, padding=kernel - stride)
        self.reach = kernel // stride - 1

    def forward(self, x: Tensor, history: History) -> Tensor:  # type: ignore[override]
        """Upsample x [streams, into, T]; see the class for the length of the result."""
        return super().forward(history.extend(x, self.reach, pad=False) if self.reach else x)
