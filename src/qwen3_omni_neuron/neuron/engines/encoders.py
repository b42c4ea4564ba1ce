"""The encoders and projections on Neuron: inputs of any length over graphs of compiled sizes."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.model.audio_encoder import tokens_of_windows, window_batches
from qwen3_omni_neuron.model.config import AudioEncoderConfig, VisionEncoderConfig
from qwen3_omni_neuron.model.vision_encoder import pad_patches, patch_places
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size
from qwen3_omni_neuron.prompt.media.pixels import Visual


class NeuronAudio:
    """An engines.media.Audio over graphs of neuron.graphs.parts.audio_graph."""

    def __init__(self, part: LoadedPart, config: AudioEncoderConfig):
        self._part, self._config = part, config
        graphs = graphs_by_size(part, "audio_encoder", "windows")
        self._labels = {windows: graph.label for (windows,), graph in graphs.items()}
        self._dtype = next(iter(graphs.values())).inputs[0].dtype

    def encode(self, clips: Sequence[Tensor], first: int = 0, stop: int | None = None) -> Tensor:
        """Encode the clips of a prompt in compiled batches of windows; see Audio.encode."""
        c, sizes = self._config, list(self._labels)
        tokens = sum(tokens_of_windows(clips, c)[first:stop])
        rows = torch.empty(tokens, c.output_size, dtype=self._dtype)
        end = 0
        for batch in window_batches(clips, c, sizes[-1], first=first, stop=stop):
            size = batch_bucket(len(batch.mel), sizes)
            (encoded,) = self._part.call(
                self._labels[size],
                pad_rows(batch.mel.to(self._dtype), size),
                # All True in padding: a window without any valid token would attend to nothing.
                pad_rows(batch.valid, size, True),
                torch.tensor([batch.chunk_width]),
            )
            valid = encoded[: len(batch.mel)][batch.valid]
            rows[end : end + len(valid)] = valid
            end += len(valid)
        return rows


class NeuronVision:
    """An engines.media.Vision over graphs of neuron.graphs.parts.vision_graph."""

    def __init__(self, part: LoadedPart, config: VisionEncoderConfig):
        self._part, self._config = part, config
        graphs = graphs_by_size(part, "vision_encoder", "patches")
        self._labels = {patches: graph.label for (patches,), graph in graphs.items()}
        self._dtype = next(iter(graphs.values())).inputs[0].dtype

    def encode(self, visuals: Iterable[Visual]) -> Tensor:
        """Encode images and videos frame by frame; see Vision.encode.

        Raises BucketError for a frame of more patches than any graph takes.
        """
        return torch.cat([rows for visual in visuals for rows in self._frames(visual)], 1)

    def _frames(self, visual: Visual) -> Iterator[Tensor]:
        """Encode each frame to [1 + deepstack, rows, hidden]."""
        frames, height, width = visual.grid
        merge, size = self._config.merge_size, height * width
        bucket = bucket_of(size, list(self._labels), "patches in a frame")
        places, grid = patch_places(height, width, merge), torch.tensor((height, width))
        for index in range(frames):
            frame = visual.part(index, index + 1).patches().to(self._dtype)
            patches, padded_places, valid = pad_patches(frame, places, bucket)
            (rows,) = self._part.call(self._labels[bucket], patches, padded_places, grid, valid)
            yield rows[:, 0, : size // merge**2]


class NeuronProjection:
    """A projection of the thinker's rows to the talker's.

    name: "text_projection" or "hidden_projection".
    """

    def __init__(self, part: LoadedPart, name: str):
        self._part = part
        graphs = graphs_by_size(part, name, "rows")
        self._labels = {rows: graph.label for (rows,), graph in graphs.items()}
        first = next(iter(graphs.values()))
        self._dtype, self._width = first.inputs[0].dtype, first.outputs[0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Project rows. x: [rows, thinker hidden] -> [rows, talker hidden]."""
        rows = torch.empty(len(x), self._width, dtype=self._dtype)
        for batch, size in batches(len(x), list(self._labels)):
            (projected,) = self._part.call(
                self._labels[size], pad_rows(x[batch].to(self._dtype), size)
            )
            rows[batch] = projected[: batch.stop - batch.start]
        return rows


def batch_bucket(rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending `sizes` that holds `rows`, or else the largest."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def batches(rows: int, sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Return the rows of each call, and the size of the batch that they are padded to.

    9 rows in batches of (1, 4) are calls of 4, 4 and 1.
    """
    start = 0
    while start < rows:
        size = batch_bucket(rows - start, sizes)
        stop = min(start + size, rows)
        yield slice(start, stop), size
        start = stop


def pad_rows(x: Tensor, size: int, value: float = 0) -> Tensor:
    """Pad x [n, ...] to [size, ...] with `value`."""
    if len(x) == size:  # F.pad copies even where it adds nothing
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, size - len(x)), value=value)
