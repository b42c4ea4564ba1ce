"""code2wav on Neuron, with the states of its streams on the device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import cut_audio, pad_chunks
from qwen3_omni_neuron.engines.protocols import Fault
from qwen3_omni_neuron.model.config import Code2WavConfig
from qwen3_omni_neuron.neuron.engines.encoders import batch_bucket, pad_rows
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size


class NeuronVocoder:
    """The vocoder (see engines.protocols.Vocoder) over neuron.graphs.parts.code2wav_graph.

    Slots, chunk sizes and batches are those of the graphs. Each engine call is one graph call. If a
    graph that fails changes no state, an engine call that raises changes no slot's state.
    """

    def __init__(
        self,
        part: LoadedPart,
        config: Code2WavConfig,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        """release: called by `close`. fault: see engines.slots.DecoderEngine."""
        self._part, self._release, self.fault = part, release, fault
        self._graphs = graphs_by_size(part, "code2wav", "streams", "frames")
        self.slots = next(iter(self._graphs.values())).state[0].shape[0]
        self._batches = sorted({streams for streams, _ in self._graphs})
        self.chunk_frames = tuple(sorted({frames for _, frames in self._graphs}))
        self.frames_at_once = self.slots * self.chunk_frames[-1]
        self.frame_samples = config.frame_samples
        self.latency_samples = config.latency_samples
        # Frames decoded so far, by slot whose stream can go on.
        self._positions: dict[int, int] = {}

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams; see Vocoder.start.

        Raises BucketError for a chunk of no frames or of too many.
        """
        return self._decode(slots, codes, [0] * len(slots), self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams; see Vocoder.step.

        Every slot was started, and its last chunk was not padded. Raises as `start`.
        """
        lost = [slot for slot in slots if slot not in self._positions]
        assert not lost, f"slots {lost} hold no stream: not started, at its end, or closed"
        return self._decode(slots, codes, [self._positions[slot] for slot in slots], 0)

    def close(self) -> None:
        """Release graphs, weights and states."""
        self._positions.clear()
        self._part.close()
        self._release()

    def _decode(
        self, slots: Sequence[int], codes: Sequence[Tensor], positions: Sequence[int], late: int
    ) -> list[NDArray[np.float32]]:
        """Decode a chunk of each stream.

        positions: frames before each chunk. late: number of the samples at the beginning that have
        no meaning.
        """
        if len(slots) != len(codes) or len(set(slots)) < len(slots):
            raise ValueError(f"one chunk for each of several slots, got {len(codes)} for {slots}.")
        assert all(0 <= slot < self.slots for slot in slots), slots
        chunks = pad_chunks(codes, self.chunk_frames)
        frames, size = chunks.shape[2], batch_bucket(len(slots), self._batches)
        (samples,) = self._part.call(
            self._graphs[size, frames].label,
            pad_rows(chunks, size).contiguous(),
            pad_rows(torch.tensor(slots), size, self.slots),
            pad_rows(torch.tensor(positions), size),
        )
        for slot, chunk, position in zip(slots, codes, positions, strict=True):
            self._positions.pop(slot, None)
            # A stream ends with a padded chunk, because its state then includes the padding.
            if len(chunk) == frames:
                self._positions[slot] = position + frames
        return cut_audio(codes, samples[:, late:], self.frame_samples, late)
