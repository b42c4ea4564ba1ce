"""The graphs of the encoders and of the talker's projections."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.model.config import AudioEncoderConfig, TalkerConfig, VisionEncoderConfig


def audio_graph(c: AudioEncoderConfig, windows: Axis, dtype: torch.dtype) -> Graph:
    """Describe the audio encoder over a batch of windows of 8 s, of clips of any length."""
    frames, tokens = c.window_mel_frames, c.window_tokens
    return Graph(
        "audio_encoder",
        {"windows": windows},
        "audio_encoder",
        _stateless,
        (
            TensorSpec("mel", (windows, c.mel_bins, frames), dtype),
            TensorSpec("valid", (windows, tokens), torch.bool, idle=True),
            TensorSpec(
                "chunk_width", (1,), torch.int64, c.chunk_mel_frames + 1, c.chunk_mel_frames
            ),
        ),
        (TensorSpec("rows", (windows, tokens, c.output_size), dtype),),
    )


def vision_graph(c: VisionEncoderConfig, frames: Axis, patches: Axis, dtype: torch.dtype) -> Graph:
    """Describe the vision encoder over frames of one size, padded to `patches` each."""
    rows = patches // c.merge_size**2 if isinstance(patches, int) else "merged"
    return Graph(
        "vision_encoder",
        {"patches": patches},
        "vision_encoder",
        _stateless,
        (
            TensorSpec("patches", (frames, patches, c.patch_values), dtype),
            TensorSpec("places", (2, patches), torch.int64, c.positions_per_side),
            TensorSpec("grid", (2,), torch.int64, 2 * c.positions_per_side),
            TensorSpec("valid", (patches,), torch.bool, idle=True),
        ),
        (TensorSpec("rows", (1 + len(c.deepstack_layers), frames, rows, c.output_size), dtype),),
    )


def projection_graphs(c: TalkerConfig, rows: Axis, dtype: torch.dtype) -> Iterator[Graph]:
    """Describe the projections to talker rows: of text, and of the accept layer's media rows."""
    for name in ("text_projection", "hidden_projection"):
        yield Graph(
            name,
            {"rows": rows},
            name,
            _stateless,
            (TensorSpec("x", (rows, c.thinker_hidden_size), dtype),),
            (TensorSpec("rows", (rows, c.text.hidden_size), dtype),),
        )


def _stateless(owner: nn.Module, inputs: tuple[Tensor, ...], _: State) -> tuple[Outputs, State]:
    return (owner(*inputs),), ()
