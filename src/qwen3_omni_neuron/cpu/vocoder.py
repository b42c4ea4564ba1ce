"""code2wav on the CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.code2wav import code2wav_calls
from qwen3_omni_neuron.engine.chunks import cut_sound, pad_chunks
from qwen3_omni_neuron.model.code2wav import Code2Wav, State
from qwen3_omni_neuron.plan import CHUNK_FRAMES


class CpuVocoder:
    """Serves runtime.protocols.Vocoder over model.code2wav: a streaming state a slot.

    Two functions, of a first chunk and of a later one, serve every chunk size and number of slots.
    A slot whose chunk was padded keeps no state: what it heard last was padding.
    """

    def __init__(
        self, code2wav: Code2Wav, slots: int, chunk_frames: tuple[int, ...] = CHUNK_FRAMES
    ):
        """chunk_frames: ascending."""
        self.slots = slots
        self.chunk_frames = chunk_frames
        self.frame_samples = code2wav.config.frame_samples
        self.latency_samples = code2wav.config.latency_samples
        self._states: dict[int, State] = {}

        self._start, self._step = code2wav_calls(code2wav)

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """As the protocol has it. Raises BucketError for a chunk of no frames or of too many."""
        batch = pad_chunks(codes, self.chunk_frames)
        samples, state = self._start(batch)
        return self._finish(slots, codes, samples, state, self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """As `start`. Every slot was started, and its last chunk was not padded."""
        batch = pad_chunks(codes, self.chunk_frames)
        lost = [slot for slot in slots if slot not in self._states]
        assert not lost, f"slots {lost} hold no stream: not started, at its end, or closed"
        samples, state = self._step(batch, _join([self._states[slot] for slot in slots]))
        return self._finish(slots, codes, samples, state, 0)

    def close(self) -> None:
        self._states.clear()

    def _finish(
        self,
        slots: Sequence[int],
        codes: Sequence[Tensor],
        samples: Tensor,
        state: State,
        late: int,
    ) -> list[NDArray[np.float32]]:
        """Put the new states into their slots, and cut the sound of the padding off."""
        frames = (samples.shape[1] + late) // self.frame_samples
        parts = zip(slots, codes, _part(state), strict=True)
        kept = {slot: left for slot, chunk, left in parts if len(chunk) == frames}
        for slot in slots:
            self._states.pop(slot, None)
        self._states |= kept
        return cut_sound(codes, samples, self.frame_samples, late)


def _join(states: list[State]) -> State:
    """States of one stream each -> the state of all of them. One alone is taken as it is."""
    if len(states) == 1:
        return states[0]
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _part(state: State) -> list[State]:
    """The reverse of _join."""
    return list(zip(*(tensor.split(1) for tensor in state), strict=True))
