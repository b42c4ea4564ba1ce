"""Vocoder engine on the CPU: code2wav in chunks, with a streaming state a slot."""

import ctypes
from collections.abc import Callable, Sequence

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
    chunk_frames: ascending. library, threads: see code2wav_calls.
    """

    def __init__(
        self,
        code2wav: Code2Wav,
        slots: int,
        chunk_frames: tuple[int, ...] = CHUNK_FRAMES,
        library: ctypes.CDLL | None = None,
        threads: int = 1,
    ):
        self.slots = slots
        self.chunk_frames = chunk_frames
        self.frame_samples = code2wav.config.frame_samples
        self.latency_samples = code2wav.config.latency_samples
        self._states: dict[int, State] = {}
        self._start, self._step = code2wav_calls(code2wav, library, threads)

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams; see engines.protocols.Vocoder.start.

        Raises BucketError for a chunk of no frames or of too many.
        """
        batch = pad_chunks(codes, self.chunk_frames, any_size=True)
        samples, state = self._start(batch)
        return self._finish(slots, codes, samples, state, self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams; see engines.protocols.Vocoder.step.

        Every slot was started, and its last chunk was not padded. Raises BucketError as `start`.
        """
        batch = pad_chunks(codes, self.chunk_frames, any_size=True)
        stateless = [slot for slot in slots if slot not in self._states]
        assert not stateless, (
            f"slots {stateless} hold no stream: not started, at its end, or closed"
        )
        samples, state = self._step(batch, _join([self._states[slot] for slot in slots]))
        return self._finish(slots, codes, samples, state, 0)

    def close(self) -> None:
        """Free the streaming states."""
        self._states.clear()

    def _finish(
        self,
        slots: Sequence[int],
        codes: Sequence[Tensor],
        samples: Tensor,
        state: State,
        missing: int,
    ) -> list[NDArray[np.float32]]:
        """Keep the new states of the slots, and cut the samples of padding off.

        missing: samples that a stream's first chunk has fewer; 0 for later chunks.
        """
        frames = (samples.shape[1] + missing) // self.frame_samples
        parts = zip(slots, codes, _split(state), strict=True)
        kept = {slot: own for slot, chunk, own in parts if len(chunk) == frames}
        for slot in slots:
            self._states.pop(slot, None)
        self._states |= kept
        return cut_audio(codes, samples, self.frame_samples, missing)


Start = Callable[[Tensor], tuple[Tensor, State]]
Step = Callable[[Tensor, State], tuple[Tensor, State]]


def code2wav_calls(
    code2wav: Code2Wav, library: ctypes.CDLL | None = None, threads: int = 1
) -> tuple[Start, Step]:
    """Return functions that compute Code2Wav.start and Code2Wav.step.

    A state fits only the functions of its own pair. Its tensors have the streams as first axis.
    library: in which they run, by up to so many threads; None: in torch.
    """
    if library is None:
        return code2wav.start, code2wav.step
    native = NativeCode2Wav(code2wav, library, threads)
    return native.start, native.step


def _join(states: list[State]) -> State:
    """Join the states of single streams to one state of all of them, without a copy of a single."""
    if len(states) == 1:
        return states[0]
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _split(state: State) -> list[State]:
    """Split a state into those of single streams: the reverse of _join."""
    return list(zip(*(tensor.split(1) for tensor in state), strict=True))
