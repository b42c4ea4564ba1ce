"""Vocoder engine on the CPU: code2wav in chunks, with a streaming state a slot."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav
from qwen3_omni_neuron.engines.inputs import cut_audio, pad_chunks
from qwen3_omni_neuron.model.code2wav import Code2Wav, State


class CpuVocoder:
    """Vocoder over model.code2wav; see engines.protocols.Vocoder.

    A slot whose chunk was padded keeps no state, because the state would include padding.
    chunk_frames: chunk sizes, ascending. library, threads: see code2wav_calls.
    """

    def __init__(
        self,
        code2wav: Code2Wav,
        slots: int,
        chunk_frames: tuple[int, ...] = CHUNK_FRAMES,
        library: Any = None,
        threads: int = 1,
    ):
        self.slots = slots
        self.chunk_frames = chunk_frames
        self.frame_samples = code2wav.config.frame_samples
        self.latency_samples = code2wav.config.latency_samples
        self._states: dict[int, Any] = {}
        self._calls = code2wav_calls(code2wav, library, threads)

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams; see engines.protocols.Vocoder.start.

        Raises BucketError for a chunk of no frames or of too many.
        """
        batch = pad_chunks(codes, self.chunk_frames, any_size=True)
        samples, state = self._calls.start(batch)
        return self._finish(slots, codes, samples, state, self.latency_samples)

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams; see engines.protocols.Vocoder.step.

        Every slot was started, and its last chunk was not padded. Raises BucketError as `start`.
        """
        batch = pad_chunks(codes, self.chunk_frames, any_size=True)
        stateless = [slot for slot in slots if slot not in self._states]
        assert not stateless, (
            f"slots {stateless} hold no stream: not started, at its end, or closed"
        )
        joined = self._calls.join([self._states[slot] for slot in slots])
        samples, state = self._calls.step(batch, joined)
        return self._finish(slots, codes, samples, state, 0)

    def close(self) -> None:
        """Free the streaming states."""
        self._states.clear()

    def _finish(
        self,
        slots: Sequence[int],
        codes: Sequence[Tensor],
        samples: Tensor,
        state: Any,
        missing: int,
    ) -> list[NDArray[np.float32]]:
        """Keep the new states of the slots, and cut the samples of padding off.

        missing: number of samples that a stream's first chunk lacks; 0 for later chunks.
        """
        frames = (samples.shape[1] + missing) // self.frame_samples
        parts = zip(slots, codes, self._calls.split(state), strict=True)
        kept = {slot: own for slot, chunk, own in parts if len(chunk) == frames}
        for slot in slots:
            self._states.pop(slot, None)
        self._states |= kept
        return cut_audio(codes, samples, self.frame_samples, missing)


class Code2WavCalls(Protocol):
    """Code2Wav.start and Code2Wav.step, whose states fit only the calls of the same object."""

    def start(self, codes: Tensor) -> tuple[Tensor, Any]:
        """Decode the first chunk of streams. Returns the samples and the state."""
        ...

    def step(self, codes: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Decode the next chunk of streams. `state` is kept."""
        ...

    def join(self, states: Sequence[Any]) -> Any:
        """Join the states of single streams into one state, without a copy if there is only one."""
        ...

    def split(self, state: Any) -> Sequence[Any]:
        """Split a state into those of single streams: the reverse of `join`."""
        ...


def code2wav_calls(code2wav: Code2Wav, library: Any = None, threads: int = 1) -> Code2WavCalls:
    """Return calls in `library`, with up to `threads` threads, or in torch where it is None."""
    if library is None:
        return _TorchCalls(code2wav)
    return NativeCode2Wav(code2wav, library, threads)


class _TorchCalls:
    """Calls in torch. A state's tensors have the streams as first axis."""

    def __init__(self, code2wav: Code2Wav):
        self._code2wav = code2wav

    @torch.inference_mode()
    def start(self, codes: Tensor) -> tuple[Tensor, State]:
        return self._code2wav.start(codes)

    @torch.inference_mode()
    def step(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        return self._code2wav.step(codes, state)

    def join(self, states: Sequence[State]) -> State:
        if len(states) == 1:
            return states[0]
        return tuple(torch.cat(parts) for parts in zip(*states, strict=True))

    def split(self, state: State) -> Sequence[State]:
        return list(zip(*(tensor.split(1) for tensor in state), strict=True))
