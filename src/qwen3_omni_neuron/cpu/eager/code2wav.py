"""Code2wav in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.model.code2wav import Code2Wav, State


class EagerCode2Wav:
    """Code2WavCalls of cpu.vocoder. A state's tensors have the streams as first axis."""

    def __init__(self, code2wav: Code2Wav):
        self._code2wav, self.config = code2wav, code2wav.config

    @torch.inference_mode()
    def start(self, codes: Tensor) -> tuple[Tensor, State]:
        """Decode the first chunk of streams."""
        return self._code2wav.start(codes)

    @torch.inference_mode()
    def step(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode the next chunk of streams. `state` is kept."""
        return self._code2wav.step(codes, state)

    def join(self, states: Sequence[State]) -> State:
        """Join the states of single streams into one state, without a copy if there is only one."""
        if len(states) == 1:
            return states[0]
        return tuple(torch.cat(parts) for parts in zip(*states, strict=True))

    def split(self, state: State) -> Sequence[State]:
        """Split a state into those of single streams: the reverse of `join`."""
        return list(zip(*(tensor.split(1) for tensor in state), strict=True))
