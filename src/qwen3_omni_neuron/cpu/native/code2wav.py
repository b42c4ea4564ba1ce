"""Code2wav in C: one call per chunk of several streams."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    NO_SUCH_ROW,
    Fields,
    Library,
    Pointer,
    UnsuitedError,
    Weights,
    check,
    pointer_to,
)
from qwen3_omni_neuron.model.code2wav import Code2Wav, Snake
from qwen3_omni_neuron.model.config import Code2WavConfig

NativeState = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Frames decoded [streams] and the C's states [streams, ...]; in numpy: see inputs.rows_of."""
WIDEST: int = ffi.integer_const("WIDEST")
TAPS = 7
POINTS = (1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # Winograd's, besides 0 and infinity: see wave.c
_ELEMENTS = {"int64": ffi.typeof("int64_t[]"), "float32": ffi.typeof("float[]")}


class NativeCode2Wav:
    """Code2Wav in float32 over float32 or bfloat16 weights, which it copies.

    A stream's samples do not depend on other streams, the number of threads, or the split into
    chunks. Thread-safe. Raises UnsuitedError.
    """

    def __init__(self, code2wav: Code2Wav, library: Library, threads: int = 1):
        c = self.config = code2wav.config
        if c.frame_samples <= c.latency_samples:
            raise UnsuitedError(
                f"the C needs samples from a first frame, and its {c.frame_inputs} inputs give none"
            )
        self._run, self._weights = library.run_code2wav, Weights()
        fields = _Packing(library, self._weights).code2wav(code2wav, threads)
        self._described = ffi.new("Code2Wav *", fields)
        self._state_size = library.code2wav_state_size(self._described)

    def start(self, codes: Tensor) -> tuple[Tensor, NativeState]:
        """Decode the first chunk of streams; see Code2Wav.start.

        Raises ValueError, and IndexError for a code beyond the codebook.
        """
        return self._advance(codes, None)

    def step(self, codes: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        """See Code2WavCalls.step."""
        return self._advance(codes, state)

    @staticmethod
    def join(states: Sequence[NativeState]) -> NativeState:
        """See Code2WavCalls.join."""
        if len(states) == 1:
            return states[0]
        positions, buffers = zip(*states, strict=True)
        return np.concatenate(positions), np.concatenate(buffers)

    @staticmethod
    def split(state: NativeState) -> list[NativeState]:
        """See Code2WavCalls.split."""
        positions, buffers = state
        return [(positions[i : i + 1], buffers[i : i + 1]) for i in range(len(buffers))]

    def _advance(self, codes: Tensor, state: NativeState | None) -> tuple[Tensor, NativeState]:
        c, size = self.config, self._state_size
        streams, _, frames = codes.shape
        if frames == 0:  # the C would not write the new state
            raise ValueError("code2wav decodes at least one frame a call, got a chunk of none")
        missing = c.latency_samples if state is None else 0
        samples = np.empty((streams, frames * c.frame_samples - missing), np.float32)
        new_state = np.empty((streams, size), np.float32)
        positions, buffers = (None, None) if state is None else state
        codes = codes.contiguous()
        status = self._run(
            self._described,
            streams,
            pointer_to(codes, torch.int64, streams, c.code_groups, frames),
            frames,
            ffi.NULL if positions is None else _address(positions, "int64", streams),
            ffi.NULL if buffers is None else _address(buffers, "float32", streams, size),
            _address(new_state, "float32", streams, size),
            _address(samples, "float32", *samples.shape),
        )
        if status == NO_SUCH_ROW:
            least, most = int(codes.min()), int(codes.max())
            raise IndexError(f"codes are 0 to {c.codebook_size - 1}, got {least} to {most}")
        check(status)
        before = np.zeros(streams, np.int64) if positions is None else positions
        return torch.from_numpy(samples), (before + frames, new_state)


def _address(values: NDArray[Any], dtype: str, *shape: int) -> Pointer:
    if values.dtype != dtype or values.shape != shape or not values.flags.c_contiguous:
        raise ValueError(
            f"the C takes dense {dtype} {list(shape)} here, got {values.dtype} {list(values.shape)}"
        )
    return ffi.from_buffer(_ELEMENTS[dtype], values)


class _Packing:
    """Descriptions of code2wav's parts, over packed `weights`."""

    def __init__(self, library: Library, weights: Weights):
        self._library, self._weights = library, weights

    def code2wav(self, model: Code2Wav, threads: int) -> Fields:
        c, half = model.config, model.config.head_dim // 2
        stages = [self._stage(stage, c.hidden_size) for stage in model.upsample]
        into, first_block = model.conv_in, model.blocks[0]
        return {
            "decoder": self._decoder(c, model),
            "embedding": self._table(model.embedding.weight),
            "groups": c.code_groups,
            "codes": c.codebook_size,
            "frequencies": self._vector(model.rotary.frequencies[:half], half),
            "stages": len(stages),
            "stage": self._weights.array("Stage", stages),
            # Inputs are adjacent rows: [out, in, taps] -> [out, taps * in].
            "conv_in": self._matrix(into.weight.transpose(1, 2).flatten(1), bias=into.bias),
            "up": self._matrix(*_up(first_block.upsample, c.decoder_dim)),
            "wave": self._wave(model),
            "threads": threads,
        }

    def _decoder(self, c: Code2WavConfig, model: Code2Wav) -> Fields:
        return {
            "layers": len(model.layers),
            "hidden": c.hidden_size,
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "ffn": c.ffn_width,
            "window": c.sliding_window,
            "norm_eps": c.norm_eps,
            "layer": self._weights.array(
                "Layer", [self._layer(c, layer) for layer in model.layers]
            ),
            "norm": self._vector(model.norm.weight, c.hidden_size),
        }

    def _layer(self, c: Code2WavConfig, layer: Any) -> Fields:
        return {
            "attention_norm": self._vector(layer.attention_norm.weight, c.hidden_size),
            "qkv": self._matrix(layer.qkv.weight),
            "out": self._matrix(layer.out.weight, scale=layer.attention_scale),
            "ffn_norm": self._vector(layer.ffn_norm.weight, c.hidden_size),
            "gate_up": self._matrix(layer.ffn.gate_up.weight.unflatten(0, (2, c.ffn_width))),
            "down": self._matrix(layer.ffn.down.weight, scale=layer.ffn_scale),
        }

    def _stage(self, stage: Any, hidden: int) -> Fields:
        up, scale = stage.conv, stage.scale
        return {
            "ratio": up.stride[0],
            # One matrix per sample: [in, out, ratio] -> [ratio, out, in].
            "up": self._matrix(up.weight.permute(2, 1, 0), bias=up.bias),
            "depthwise": self._vector(stage.depthwise.weight[:, 0].t(), TAPS, hidden),
            "depthwise_bias": self._vector(stage.depthwise.bias, hidden),
            "norm": self._vector(stage.norm.weight, hidden),
            "norm_bias": self._vector(stage.norm.bias, hidden),
            "norm_eps": stage.norm.eps,
            "fc1": self._matrix(stage.fc1.weight, bias=stage.fc1.bias),
            "fc2": self._matrix(stage.fc2.weight, scale=scale, bias=stage.fc2.bias.float() * scale),
        }

    def _wave(self, model: Code2Wav) -> Fields:
        blocks = [self._block(block, first=i == 0) for i, block in enumerate(model.blocks)]
        last, spare = model.conv_out, WIDEST - TAPS  # spare outputs: for whole vectors
        assert last.bias is not None
        return {
            "blocks": len(blocks),
            "block": self._weights.array("Block", blocks),
            "act": self._snake(model.act_out),
            "conv": self._rows_of(
                F.pad(last.weight[0].t(), (0, 0, 0, spare)), F.pad(last.bias, (TAPS - 1, spare))
            ),
        }

    def _block(self, block: Any, first: bool) -> Fields:
        up, rate = block.upsample, block.upsample.stride[0]
        into, out, taps = up.weight.shape
        if taps != 2 * rate:
            raise UnsuitedError(
                f"the C upsamples with kernels of two strides, got {taps} taps for a stride of "
                f"{rate}"
            )
        return {
            "into": into + _padding(into),
            "out": out + _padding(out),
            "rate": rate,
            "act": self._snake(block.act),
            "up": {} if first else self._rows_of(*_up(up, into + _padding(into))),
            "units": [self._unit(unit) for unit in block.units],
        }

    def _unit(self, unit: Any) -> Fields:
        conv, point = unit.conv1, unit.conv2
        matrix_of = _by_point if conv.out_channels > WIDEST // 2 else _by_line
        return {
            "dilation": conv.dilation[0],
            "first": self._snake(unit.act1),
            "second": self._snake(unit.act2),
            "conv": self._rows_of(matrix_of(conv), _line(conv.bias)),
            "point": self._rows_of(_by_line(point), _line(point.bias)),
        }

    def _snake(self, act: Snake) -> Fields:
        both = (_line(weight[:, 0]) for weight in (act.frequency, act.inverse_magnitude))
        frequency, inverse_magnitude = (self._vector(weight, len(weight)) for weight in both)
        return {"frequency": frequency, "inverse_magnitude": inverse_magnitude}

    def _vector(self, weight: Tensor, *shape: int) -> Pointer:
        return self._weights(_taken(weight).to(torch.float32, copy=True).contiguous(), *shape)

    def _table(self, rows: Tensor) -> Fields:
        return self._weights.table(_taken(rows).contiguous().clone(), *rows.shape)

    def _matrix(
        self, matrix: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> Fields:
        """Describe a matrix [..., out, into], packed. scale, bias: [out]."""
        out = matrix.shape[-2]
        return {
            **self._weights.packed(_taken(matrix), self._library),
            "scale": ffi.NULL if scale is None else self._vector(scale, out),
            "bias": ffi.NULL if bias is None else self._vector(bias, out),
        }

    def _rows_of(self, matrix: Tensor, bias: Tensor) -> Fields:
        """Describe a matrix of wave.c: float32, since it has few bytes and many rows."""
        return self._matrix(matrix.float(), bias)


def _taken(weight: Tensor) -> Tensor:
    """Return a weight without its gradient. Raises UnsuitedError."""
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise UnsuitedError(
            f"the C takes code2wav in float32 or bfloat16 on the CPU, got {weight.dtype} on "
            f"{weight.device}"
        )
    return weight.detach()


def _padding(channels: int) -> int:
    """Return the zeros of a row of wave.c: to a multiple of WIDEST, or a power of two below it."""
    return -channels % min(WIDEST, 1 << (channels - 1).bit_length())


def _whole(weight: Tensor, axis: int) -> Tensor:
    """Pad an axis of channels with zeros."""
    return F.pad(weight.movedim(axis, -1), (0, _padding(weight.shape[axis]))).movedim(-1, axis)


def _line(weight: Tensor) -> Tensor:
    """Return a vector [channels] for the channels of a row, or of a line of wave.c."""
    row = _whole(weight, 0)
    return row.repeat(max(1, WIDEST // len(row)))


def _by_line(conv: Any) -> Tensor:
    """Return a convolution as a matrix [outputs of a row or a line, all inputs that they need]."""
    taps = _whole(_whole(conv.weight, 0), 1).transpose(1, 2)  # [out, taps, in]
    floats, dilation = len(taps), conv.dilation[0]
    rows, reach = max(1, WIDEST // floats), (taps.shape[1] - 1) * dilation
    matrix = taps.new_zeros(rows, floats, rows + reach, floats)
    for row in range(rows):
        matrix[row, :, row : row + reach + 1 : dilation] = taps
    return matrix.flatten(2).flatten(0, 1)[:, : (rows + reach - 1) * floats + conv.in_channels]


def _up(up: Any, stride: int) -> tuple[Tensor, Tensor]:
    """Return a TransposedConv of two strides as a matrix [rate * out, stride + in], and its bias.

    Sample p * rate + phase is input p times tap `phase` plus input p - 1 times tap rate + phase.
    The matrix reads the earlier input first, and the other `stride` floats later.
    """
    rate = up.stride[0]
    taps = _whole(up.weight, 1).unflatten(2, (2, rate)).flip(2)  # [in, out, 2, rate]
    padded = F.pad(taps.permute(3, 1, 2, 0), (0, stride - len(taps)))  # [rate, out, 2, stride]
    matrix = padded.flatten(2).flatten(0, 1)
    return matrix[:, : stride + len(taps)], _whole(up.bias, 0).repeat(rate)


def _by_point(conv: Any) -> Tensor:
    """Return a convolution as matrices [8, row of out, in], one per point of wave.c.

    Those of 0 and infinity are the first and last tap; another point's is the taps' polynomial,
    divided by the distances to the other points.
    """
    shares = torch.zeros(len(POINTS) + 2, TAPS, dtype=torch.float64)
    shares[0, 0] = shares[-1, -1] = 1
    for i, point in enumerate(POINTS, 1):
        distances = [point - other for other in (0.0, *POINTS) if other != point]
        row = [point**k / prod(distances) for k in range(TAPS)]
        shares[i] = torch.tensor(row, dtype=torch.float32)  # whatever torch's default is
    return (_whole(conv.weight, 0).double() @ shares.T).movedim(-1, 0)
