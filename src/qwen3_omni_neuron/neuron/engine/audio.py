"""The audio encoder on Neuron: the clips of a prompt, in compiled batches of windows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.config import AudioEncoderConfig
from qwen3_omni_neuron.model.audio_encoder import window_batches
from qwen3_omni_neuron.neuron.engine.batches import batch_of, pad_rows
from qwen3_omni_neuron.neuron.part.part import LoadedPart, graphs_by_size


class NeuronAudio:
    """Serves engine.prompt_media.Audio over the graphs of graphs.encoders.audio_graph."""

    def __init__(self, part: LoadedPart, config: AudioEncoderConfig):
        self._part, self._config = part, config
        graphs = graphs_by_size(part, "audio_encoder", "windows")
        self._labels = {windows: graph.label for (windows,), graph in graphs.items()}
        self._dtype = next(iter(graphs.values())).inputs[0].dtype

    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        c, sizes = self._config, list(self._labels)
        tokens = sum(c.tokens(clip.shape[1]) for clip in clips)
        rows = torch.empty(tokens, c.output_size, dtype=self._dtype)
        end = 0
        for batch in window_batches(clips, c, sizes[-1]):
            size = batch_of(len(batch.mel), sizes)
            (encoded,) = self._part.call(
                self._labels[size],
                pad_rows(batch.mel.to(self._dtype), size),
                # All of a window that is padding: one with no token would attend to nothing.
                pad_rows(batch.valid, size, True),
                torch.tensor([batch.chunk_width]),
            )
            some = encoded[: len(batch.mel)][batch.valid]
            rows[end : end + len(some)] = some
            end += len(some)
        return rows
