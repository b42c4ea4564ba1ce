"""The vision encoder on Neuron: images and videos of a prompt, frame by frame."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qwen3_omni_neuron.buckets import bucket_of
from qwen3_omni_neuron.config import VisionEncoderConfig
from qwen3_omni_neuron.model.vision_encoder import pad_patches, patch_places
from qwen3_omni_neuron.neuron.part.part import LoadedPart, graphs_by_size
from qwen3_omni_neuron.prompt import Patches


class NeuronVision:
    """Serves engine.prompt_media.Vision over the graphs of graphs.encoders.vision_graph."""

    def __init__(self, part: LoadedPart, config: VisionEncoderConfig):
        self._part, self._config = part, config
        graphs = graphs_by_size(part, "vision_encoder", "patches")
        self._labels = {patches: graph.label for (patches,), graph in graphs.items()}
        self._dtype = next(iter(graphs.values())).inputs[0].dtype

    def encode(self, pictures: Iterable[Patches]) -> Tensor:
        """As the protocol has it. Raises BucketError for a frame of more patches than any graph
        takes."""
        return torch.cat([rows for picture in pictures for rows in self._frames(picture)], 1)

    def _frames(self, picture: Patches) -> Iterator[Tensor]:
        """[1 + deepstack, rows, hidden] of each frame."""
        frames, height, width = picture.grid
        merge, size = self._config.merge_size, height * width
        bucket = bucket_of(size, list(self._labels), "patches in a frame")
        places, grid = patch_places(height, width, merge), torch.tensor((height, width))
        for frame in picture.values.view(frames, size, -1).to(self._dtype).split(1):
            patches, padded_places, valid = pad_patches(frame, places, bucket)
            (rows,) = self._part.call(self._labels[bucket], patches, padded_places, grid, valid)
            yield rows[:, 0, : size // merge**2]
