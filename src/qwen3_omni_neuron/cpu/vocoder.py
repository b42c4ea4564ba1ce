"""Vocoder engine on the CPU: code2wav in chunks, with a streaming state per slot."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from qwen3_omni_neuron.engines.inputs import cut_audio, pad_chunks
from qwen3_omni_neuron.engines.protocols import Fault
from qwen3_omni_neuron.model.config import Code2WavConfig

FRAMES_AT_ONCE = 16  # beyond, arithmetic dominates, not the reading of weights


class CpuVocoder:
    """Vocoder over calls of code2wav; see engines.protocols.Vocoder.

    After a padded chunk a slot has no state: it would include padding.
    """

    fault: Fault | None = None

    def __init__(
        self, calls: "Code2WavCalls", slots: int, chunk_frames: tuple[int, ...] = CHUNK_FRAMES
    ):
        self.slots = slots
        self.chunk_frames, self.frames_at_once = chunk_frames, FRAMES_AT_ONCE
        self.frame_samples = calls.config.frame_samples
        self.latency_samples = calls.config.latency_samples
        self._states: dict[int, Any] = {}
        self._calls = calls

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode streams' first chunks. Raises BucketError for too few or many frames."""
        batch = pad_chunks(codes, self.chunk_frames, any_size=True)
        samples, state = self._calls.start(batch)
        return self._finish(slots, codes, samples, state, self.latency_samples)

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode streams' next chunks. Raises BucketError as `start`.

        Every slot was started, and its last chunk not padded.
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
        """Store the slots' new states, and cut off padding. missing: see latency_samples."""
        frames = (samples.shape[1] + missing) // self.frame_samples
        parts = zip(slots, codes, self._calls.split(state), strict=True)
        kept = {slot: own for slot, chunk, own in parts if len(chunk) == frames}
        for slot in slots:
            self._states.pop(slot, None)
        self._states |= kept
        return cut_audio(codes, samples, self.frame_samples, missing)


class Code2WavCalls(Protocol):
    """Code2Wav.start and Code2Wav.step; states fit only the same object."""

    config: Code2WavConfig

    def start(self, codes: Tensor) -> tuple[Tensor, Any]:
        """Decode the first chunk of streams to samples and state."""

    def step(self, codes: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Decode the next chunk of streams, without changing `state`."""

    def join(self, states: Sequence[Any]) -> Any:
        """Join single streams' states."""

    def split(self, state: Any) -> Sequence[Any]:
        """Reverse `join`."""
