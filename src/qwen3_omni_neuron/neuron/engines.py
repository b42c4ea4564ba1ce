"""Engines over loaded parts: encoders, projections, code predictor, vocoder, thinker and talker."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import load_tables
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.inputs import cut_audio, pad_chunks, sampling_arrays
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import DecoderSlots, Fault, PredictorSampling, ThinkerSlots
from qwen3_omni_neuron.engines.talker import TalkerEngine, TextRows
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.audio_encoder import tokens_of_windows, window_batches
from qwen3_omni_neuron.model.code_predictor import top_p_limits
from qwen3_omni_neuron.model.config import AudioEncoderConfig, Code2WavConfig, VisionEncoderConfig
from qwen3_omni_neuron.model.vision_encoder import pad_patches, patch_places
from qwen3_omni_neuron.neuron.graphs.graph import Graph, Outputs, TensorSpec
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
        """Encode a prompt's clips in compiled batches of windows."""
        c, sizes = self._config, list(self._labels)
        tokens = sum(tokens_of_windows(clips, c)[first:stop])
        rows = torch.empty(tokens, c.output_size, dtype=self._dtype)
        end = 0
        for batch in window_batches(clips, c, sizes[-1], first=first, stop=stop):
            size = batch_bucket(len(batch.mel), sizes)
            (encoded,) = self._part.call(
                self._labels[size],
                pad_rows(batch.mel.to(self._dtype), size),
                # True in padding: a window without valid tokens would attend to nothing.
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
        """Encode images and videos frame by frame. Raises BucketError for a too large frame."""
        return torch.cat([rows for visual in visuals for rows in self._frames(visual)], 1)

    def _frames(self, visual: Visual) -> Iterator[Tensor]:
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
    """Projection of thinker rows to talker rows."""

    def __init__(self, part: LoadedPart, name: str):
        self._part = part
        graphs = graphs_by_size(part, name, "rows")
        self._labels = {rows: graph.label for (rows,), graph in graphs.items()}
        first = next(iter(graphs.values()))
        self._dtype, self._width = first.inputs[0].dtype, first.outputs[0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Project [rows, thinker hidden] -> [rows, talker hidden]."""
        rows = torch.empty(len(x), self._width, dtype=self._dtype)
        for batch, size in batches(len(x), list(self._labels)):
            (projected,) = self._part.call(
                self._labels[size], pad_rows(x[batch].to(self._dtype), size)
            )
            rows[batch] = projected[: batch.stop - batch.start]
        return rows


def batch_bucket(rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest of ascending `sizes` that has `rows`, or else the largest."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def batches(rows: int, sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield the rows of each call and its padded size: 9 in (1, 4): 4, 4 and 1."""
    start = 0
    while start < rows:
        size = batch_bucket(rows - start, sizes)
        stop = min(start + size, rows)
        yield slice(start, stop), size
        start = stop


def pad_rows(x: Tensor, size: int, value: float = 0) -> Tensor:
    """Pad x [n, ...] to [size, ...] with `value`."""
    if len(x) == size:  # F.pad always copies
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, size - len(x)), value=value)


Frame = Callable[[Tensor, Sequence[Tensor], Graph | None], Outputs]
"""Computes frames: (their rows in the graph, inputs of the talker's step, its graph) -> outputs."""
StepAhead = Callable[[Sequence[int], Sequence[int], Frame], Tensor]
"""GraphSlots.step_ahead with text tokens for rows: (slots, token ids, frame) -> codes."""


def in_places(specs: Sequence[TensorSpec], given: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Return a graph's inputs: each tensor's row i is in row rows[i], the other rows are idle."""
    pairs = zip(specs, given, strict=True)
    return [spec.idle_input().index_copy_(0, rows, x.to(spec.dtype)) for spec, x in pairs]


class NeuronPredictor:
    """An engines.protocols.Predictor over neuron.graphs.parts.predictor_graph.

    codes: size of a code's vocabulary. step_ahead: None: the talker's step is no graph of this
    package.
    """

    def __init__(self, part: LoadedPart, codes: int, step_ahead: StepAhead | None):
        self._part, self._codes, self._step_ahead = part, codes, step_ahead
        (self._graph,) = part.graphs.values()
        self._most = self._graph.size("top_k")

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        """Complete each frame. Raises BucketError for a top_k above the compiled one."""
        rows, inputs = list(slots), self._graph.inputs
        noise, top_p, top_k = sampling_arrays(sampling, *inputs[2].shape[1:])
        limits = torch.tensor([self._limit(k) for k in top_k])
        how = torch.from_numpy(noise), top_p_limits(top_p), limits
        given = hidden[rows], torch.tensor(code0), *how

        def frame(places: Tensor, step: Sequence[Tensor], then: Graph | None = None) -> Outputs:
            own = in_places(inputs[: len(given)], given, places)
            return self._part.call(self._graph.label, *own, *step, then=then)

        known = [each.token_id for each in sampling if each.token_id is not None]
        if self._step_ahead is not None and len(known) == len(rows):
            return self._step_ahead(slots, known, frame)
        step = [spec.idle_input() for spec in inputs[len(given) :]]
        codes, sums, *_ = frame(torch.arange(len(rows)), step)
        feedback[rows] = sums[: len(rows)].to(feedback.dtype)
        return codes[: len(rows)]

    def _limit(self, top_k: int) -> int:
        limit = min(top_k or self._codes, self._codes)
        if limit > self._most:
            raise BucketError(
                f"predictor_top_k is {top_k}{'' if top_k else ' (no limit)'}, and the code "
                f"predictor was compiled to choose from at most {self._most} codes. Ask for 1 to "
                f"{self._most}, or compile it for more."
            )
        return limit


class NeuronVocoder:
    """The vocoder (see engines.protocols.Vocoder) over neuron.graphs.parts.code2wav_graph."""

    def __init__(
        self,
        part: LoadedPart,
        config: Code2WavConfig,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        """release: called by `close`. fault: see engines.thinker.DecoderEngine."""
        self._part, self._release, self.fault = part, release, fault
        self._graphs = graphs_by_size(part, "code2wav", "streams", "frames")
        self.slots = next(iter(self._graphs.values())).state[0].shape[0]
        self._batches = sorted({streams for streams, _ in self._graphs})
        self.chunk_frames = tuple(sorted({frames for _, frames in self._graphs}))
        self.frames_at_once = self.slots * self.chunk_frames[-1]
        self.frame_samples = config.frame_samples
        self.latency_samples = config.latency_samples
        # Decoded frames, by slot whose stream can continue.
        self._positions: dict[int, int] = {}

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams. Raises BucketError for no or too many frames."""
        return self._decode(slots, codes, [0] * len(slots), self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams. Raises as `start`.

        Every slot was started, and its last chunk not padded.
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
        """Decode a chunk of each stream. late: number of meaningless first samples."""
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
            # A padded chunk ends a stream: its state includes the padding.
            if len(chunk) == frames:
                self._positions[slot] = position + frames
        return cut_audio(codes, samples[:, late:], self.frame_samples, late)


LoadPart = Callable[[str], LoadedPart]
"""Function that loads a part by name, and calls each of its graphs once."""


def thinker_engine(
    spec: EngineSpec,
    slots: ThinkerSlots,
    part: LoadPart,
    release: Callable[[], None],
    fault: Fault | None = None,
) -> ThinkerEngine:
    """Load the encoders, and build the engine."""
    c = spec.config.thinker
    audio = NeuronAudio(part("audio_encoder"), c.audio)
    vision = NeuronVision(part("vision_encoder"), c.vision)
    media = MediaEncoders(spec.config, audio, vision, spec.dtype)
    return ThinkerEngine(spec.config, slots, media, release, fault)


def talker_engine(
    spec: EngineSpec,
    slots: Callable[[], DecoderSlots],
    part: LoadPart,
    unload: Callable[[LoadedPart], object],
    release: Callable[[], None],
    fault: Fault | None = None,
) -> TalkerEngine:
    """Build the engine. slots: loads the decoder, after release of the text projection."""
    config = spec.config
    tables = load_tables(Checkpoint(spec.plan.model, spec.plan.adapters), config, spec.dtype)
    assert config.talker and tables.embedding and tables.codec_embedding
    text = part("text_projection")
    table, project_text = tables.embedding.weight.detach(), NeuronProjection(text, text.name)
    text_rows = TextRows(table, project_text, config.talker.text.hidden_size, spec.dtype).fill()
    unload(text)
    decoder, codes = slots(), config.talker.predictor.vocab_size
    step_rows: Any = getattr(decoder, "step_ahead", None)

    def step_ahead(slots: Sequence[int], token_ids: Sequence[int], frame: Frame) -> Tensor:
        return step_rows(slots, text_rows(torch.tensor(token_ids)), frame)

    return TalkerEngine(
        config,
        decoder,
        NeuronPredictor(part("code_predictor"), codes, step_ahead if step_rows else None),
        tables.codec_embedding.weight,
        text_rows,
        NeuronProjection(part("hidden_projection"), "hidden_projection"),
        spec.newline_id,
        release,
        fault,
    )
