"""code2wav on Neuron, with the states of its streams on the device."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import cut_audio, pad_chunks
from qwen3_omni_neuron.engines.protocols import Fault
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.model.config import Code2WavConfig
from qwen3_omni_neuron.neuron.engines.encoders import batch_bucket, pad_rows
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size

GraphsBySize = Mapping[tuple[int, ...], Graph]
"""Graphs by (streams, frames)."""


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
        """release: called by `close`. fault: see engines.slots.DecoderEngine.

        Raises ArtifactError where graphs are missing.
        """
        self._part, self._release, self.fault = part, release, fault
        self._starts = graphs_by_size(part, "code2wav_start", "streams", "frames")
        self._steps = graphs_by_size(part, "code2wav_step", "streams", "frames")
        # The last row of the state is for padding.
        self.slots = next(iter(self._starts.values())).state[0].lengths[0] - 1
        self._batches = sorted({streams for streams, _ in self._starts})
        self.chunk_frames = tuple(sorted({frames for _, frames in self._starts}))
        self.frames_at_once = self.slots * self.chunk_frames[-1]
        self.frame_samples = config.frame_samples
        self.latency_samples = config.latency_samples
        self._live: set[int] = set()  # slots whose stream can go on
        needed = set(product({*self._batches, self.slots}, self.chunk_frames))
        if missing := sorted((needed - self._starts.keys()) | (needed - self._steps.keys())):
            streams, frames = missing[0]
            raise ArtifactError(
                f"code2wav has no graphs for the first or the later chunks of {frames} frames of "
                f"{streams} streams. It needs every batch at every chunk size, and one batch of "
                f"all {self.slots} slots. Compile it again."
            )

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams; see Vocoder.start.

        Raises BucketError for a chunk of no frames or of too many.
        """
        return self._decode(self._starts, slots, codes, self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams; see Vocoder.step.

        Every slot was started, and its last chunk was not padded. Raises as `start`.
        """
        lost = [slot for slot in slots if slot not in self._live]
        assert not lost, f"slots {lost} hold no stream: not started, at its end, or closed"
        return self._decode(self._steps, slots, codes, 0)

    def close(self) -> None:
        """Release graphs, weights and states."""
        self._live.clear()
        self._part.close()
        self._release()

    def _decode(
        self, graphs: GraphsBySize, slots: Sequence[int], codes: Sequence[Tensor], late: int
    ) -> list[NDArray[np.float32]]:
        if len(slots) != len(codes) or len(set(slots)) < len(slots):
            raise ValueError(f"one chunk for each of several slots, got {len(codes)} for {slots}.")
        assert all(0 <= slot < self.slots for slot in slots), slots
        chunks = pad_chunks(codes, self.chunk_frames)
        frames, size = chunks.shape[2], batch_bucket(len(slots), self._batches)
        (samples,) = self._part.call(
            graphs[size, frames].label,
            pad_rows(chunks, size).contiguous(),
            pad_rows(torch.tensor(slots), size, self.slots),
        )
        self._live -= set(slots)
        # A stream ends with a padded chunk, because its state then includes the padding.
        self._live |= {s for s, chunk in zip(slots, codes, strict=True) if len(chunk) == frames}
        return cut_audio(codes, samples, self.frame_samples, late)
