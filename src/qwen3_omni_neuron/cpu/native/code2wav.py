"""Decoder blocks of code2wav in C."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import (
    Number,
    Pointer,
    UnsuitedError,
    Weights,
    check,
    pointer_to,
)
from qwen3_omni_neuron.model.code2wav import UNIT_DILATIONS, Code2Wav, Snake

INPUTS_AT_A_TIME = 16
"""Inputs that are computed together: four frames of the released checkpoint.

Enough to fill whole vectors, and few enough for the results to stay in the processor's cache.
"""


class _Snake(ctypes.Structure):
    _fields_ = [(name, Pointer) for name in ("frequency", "inverse_magnitude")]


class _Unit(ctypes.Structure):
    _fields_ = [
        ("dilation", Number),
        ("first", _Snake),
        ("second", _Snake),
        *((name, Pointer) for name in ("conv", "conv_bias", "point", "point_bias")),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, Number) for name in ("into", "out", "rate")),
        ("act", _Snake),
        *((name, Pointer) for name in ("up", "up_bias")),
        ("units", _Unit * len(UNIT_DILATIONS)),
    ]


class _Wave(ctypes.Structure):
    """Wave of wave.c."""

    _fields_ = [
        *((name, Number) for name in ("count", "inputs")),
        ("block", ctypes.POINTER(_Block)),
        ("act", _Snake),
        *((name, Pointer) for name in ("conv", "bias")),
    ]


STRUCTS = {"Snake": _Snake, "Unit": _Unit, "Block": _Block, "Wave": _Wave}


class NativeWave:
    """Code2Wav.wave in C over the module's own weights, in float32.

    The results are the module's except for rounding. A stream's result does not depend on the other
    streams. Several threads may call it at once.
    Raises UnsuitedError where the C can't take the weights.
    """

    def __init__(self, code2wav: Code2Wav, library: ctypes.CDLL):
        c = code2wav.config
        self._rates = c.upsample_rates
        if self._samples(c.frame_inputs, first=True) <= 0:
            raise UnsuitedError(
                f"the C needs samples from a first frame, and its {c.frame_inputs} inputs give none"
            )
        self._run = library.run_wave
        self._weights = weights = Weights()
        blocks = [_block(block, weights) for block in code2wav.blocks]
        self._channels, channels = blocks[0].into, blocks[-1].out
        bias = code2wav.conv_out.bias
        assert bias is not None
        self._wave = _Wave(
            count=len(blocks),
            inputs=INPUTS_AT_A_TIME,
            block=(_Block * len(blocks))(*blocks),
            act=_snake(code2wav.act_out, channels, weights),
            conv=weights(code2wav.conv_out.weight, 1, channels, 7),
            bias=weights(bias, 1),
        )
        self._state_size = library.wave_state_size(ctypes.byref(self._wave))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the samples of streams' first inputs.

        x: [streams, channels, T]. Returns samples and the state for `step`, float32 [streams, ...].
        """
        return self._advance(x, torch.zeros(len(x), self._state_size), first=True)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the samples of the next inputs. Returns them and a new state; `state` is kept."""
        return self._advance(x, state.clone(), first=False)

    def _advance(self, x: Tensor, state: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        streams, _, inputs = x.shape
        x = x.contiguous()  # torch's convolutions may return another layout
        samples = torch.empty(streams, self._samples(inputs, first))
        status = self._run(
            ctypes.byref(self._wave),
            streams,
            pointer_to(x, torch.float32, streams, self._channels, inputs),
            inputs,
            first,
            pointer_to(state, torch.float32, streams, self._state_size),
            samples.data_ptr(),
        )
        check(status)
        return samples, state

    def _samples(self, inputs: int, first: bool) -> int:
        """Return how many samples so many inputs become."""
        for rate in self._rates:
            inputs = rate * (inputs - first)
        return inputs


def _snake(act: Snake, width: int, weights: Weights) -> _Snake:
    return _Snake(weights(act.frequency, width, 1), weights(act.inverse_magnitude, width, 1))


def _unit(unit: Any, width: int, weights: Weights) -> _Unit:
    """Describe a unit.

    unit: a ResidualUnit; the items of a ModuleList have no more precise type than Any.
    """
    return _Unit(
        dilation=unit.conv1.dilation[0],
        first=_snake(unit.act1, width, weights),
        second=_snake(unit.act2, width, weights),
        conv=weights(unit.conv1.weight, width, width, 7),
        conv_bias=weights(unit.conv1.bias, width),
        point=weights(unit.conv2.weight, width, width, 1),
        point_bias=weights(unit.conv2.bias, width),
    )


def _block(block: Any, weights: Weights) -> _Block:
    """Describe a block: a DecoderBlock."""
    up, rate = block.upsample, block.upsample.stride[0]
    into, out, taps = up.weight.shape
    if taps != 2 * rate:
        raise UnsuitedError(
            f"the C upsamples with kernels of two strides, got {taps} taps for a stride of {rate}"
        )
    # Sample p * rate + phase is input p times tap `phase` plus input p - 1 times tap rate + phase:
    # [into, out, 2, rate] -> [out, rate, into, 2].
    by_phase = up.weight.unflatten(2, (2, rate)).flip(2).permute(1, 3, 0, 2).contiguous()
    units = [_unit(unit, out, weights) for unit in block.units]
    return _Block(
        into=into,
        out=out,
        rate=rate,
        act=_snake(block.act, into, weights),
        up=weights(by_phase, out, rate, into, 2),
        up_bias=weights(up.bias.repeat_interleave(rate), out * rate),
        units=(_Unit * len(units))(*units),
    )
