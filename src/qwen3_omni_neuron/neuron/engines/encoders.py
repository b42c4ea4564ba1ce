"""The audio encoder on Neuron: the clips of a prompt, in compiled batches of windows."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.compilation.buckets import bucket_of
from qwen3_omni_neuron.conversation.prompt import Patches
from qwen3_omni_neuron.model.audio_encoder import window_batches
from qwen3_omni_neuron.model.config import AudioEncoderConfig, VisionEncoderConfig
from qwen3_omni_neuron.model.vision_encoder import pad_patches, patch_places
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


class NeuronProjection:
    """Thinker rows to talker rows. name: "text_projection" or "hidden_projection"."""

    def __init__(self, part: LoadedPart, name: str):
        self._part = part
        graphs = graphs_by_size(part, name, "rows")
        self._labels = {rows: graph.label for (rows,), graph in graphs.items()}
        first = next(iter(graphs.values()))
        self._dtype, self._width = first.inputs[0].dtype, first.outputs[0].lengths[1]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, thinker hidden] -> [rows, talker hidden]."""
        rows = torch.empty(len(x), self._width, dtype=self._dtype)
        for some, size in batches(len(x), list(self._labels)):
            (projected,) = self._part.call(
                self._labels[size], pad_rows(x[some].to(self._dtype), size)
            )
            rows[some] = projected[: some.stop - some.start]
        return rows


def batch_of(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes`, ascending, that holds `rows`; the largest where none does."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def batches(rows: int, sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Which rows each call takes, and the batch that they are padded to: 9 rows in (1, 4) are 4,
    4 and 1."""
    start = 0
    while start < rows:
        size = batch_of(rows - start, sizes)
        stop = min(start + size, rows)
        yield slice(start, stop), size
        start = stop


def pad_rows(x: Tensor, size: int, value: float = 0) -> Tensor:
    """x [n, ...] -> [size, ...], filled up with `value`."""
    if len(x) == size:  # even no padding would be a copy
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, size - len(x)), value=value)
