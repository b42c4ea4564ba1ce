"""The graphs of the parts beside the decoders: encoders, projections, code predictor, code2wav."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.code2wav import UNIT_DILATIONS, Code2Wav
from qwen3_omni_neuron.model.code_predictor import running_sum_by_product
from qwen3_omni_neuron.model.config import (
    AudioEncoderConfig,
    Code2WavConfig,
    TalkerConfig,
    VisionEncoderConfig,
)
from qwen3_omni_neuron.model.kv_cache import rows_by_slot
from qwen3_omni_neuron.neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec


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
    """Describe the projections to talker rows: text rows, and the accept layer's media rows."""
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


def predictor_graph(
    c: TalkerConfig,
    slots: Axis,
    top_k: Axis,
    weights: torch.dtype,
    arithmetic: torch.dtype | None = None,
) -> Graph:
    """Describe the code predictor: codes 1 to 15 of a frame for each of `slots` streams.

    top_k: the largest top_k of a stream; each stream has its own, from 1 up to this. 0: greedy.
    weights: type of the weights. arithmetic: type to compute in; None: the weights' type.
    """
    width = c.predictor.hidden_size
    inputs = [
        TensorSpec("hidden", (slots, width), arithmetic or weights),
        TensorSpec("code0", (slots,), torch.int64, c.predictor.vocab_size),
    ]
    if top_k:
        beyond = top_k + 1 if isinstance(top_k, int) else top_k
        inputs += [
            TensorSpec("uniforms", (slots, c.code_groups - 1), torch.float32, 1),
            TensorSpec("top_p", (slots,), torch.float32, 1, idle=1),
            TensorSpec("top_k", (slots,), torch.int64, beyond, idle=1),
        ]
    return Graph(
        f"code_predictor_{'sampled' if top_k else 'greedy'}",
        {"slots": slots} | ({"top_k": top_k} if top_k else {}),
        "code_predictor",
        partial(_predict, top_k=top_k),
        tuple(inputs),
        (
            TensorSpec("codes", (slots, c.code_groups), torch.int64),
            TensorSpec("feedback", (slots, width), weights),
        ),
    )


def code2wav_graph(
    c: Code2WavConfig,
    streams: Axis,
    frames: int,
    first: bool,
    slots: int,
    dtype: torch.dtype,
    kv_heads: int,
) -> Graph:
    """Describe code2wav over a chunk of `frames` frames for each of `streams` streams.

    Each row names the slot of its stream. first: whether the chunks are the streams' first, which
    fill their slots without reading them. slots: number of streams; the state has one more, the
    last, which padding rows name so that they change no stream. kv_heads: KV heads of this core.
    """
    samples = frames * c.frame_samples - (c.latency_samples if first else 0)
    return Graph(
        f"code2wav_{'start' if first else 'step'}",
        {"streams": streams, "frames": frames},
        "code2wav",
        _start if first else _step,
        (
            TensorSpec("codes", (streams, c.code_groups, frames), torch.int64, c.codebook_size),
            TensorSpec("slots", (streams,), torch.int64, slots + 1, idle=slots),
        ),
        (TensorSpec("samples", (streams, samples), dtype),),
        vocoder_state(c, slots + 1, dtype, kv_heads),
    )


def vocoder_state(
    c: Code2WavConfig, slots: int, dtype: torch.dtype, kv_heads: int
) -> tuple[TensorSpec, ...]:
    """Describe code2wav's state, in the order of model.code2wav.State, for a number of slots."""
    specs = [TensorSpec("position", (slots,), torch.int64, c.sliding_window)]
    reach = (slots, kv_heads, c.sliding_window - 1, c.head_dim)
    for layer in range(c.layers):
        specs += [TensorSpec(f"{kind}.{layer}", reach, dtype) for kind in ("keys", "values")]

    def conv(name: str, channels: int, inputs: int) -> None:
        specs.append(TensorSpec(name, (slots, channels, inputs), dtype))

    for stage in range(len(c.upsampling_ratios)):
        conv(f"upsample.{stage}", c.hidden_size, 6)
    conv("conv_in", c.hidden_size, 6)
    for block in range(len(c.upsample_rates)):
        conv(f"block.{block}", c.decoder_dim // 2**block, 1)
        for dilation in UNIT_DILATIONS:
            width = c.decoder_dim // 2 ** (block + 1)
            conv(f"block.{block}.dilation{dilation}", width, 6 * dilation)
    conv("conv_out", c.decoder_dim // 2 ** len(c.upsample_rates), 6)
    return tuple(specs)


def _predict(
    owner: nn.Module, inputs: tuple[Tensor, ...], _: State, top_k: Axis
) -> tuple[Outputs, State]:
    if not top_k:
        return owner(*inputs), ()
    assert isinstance(top_k, int)
    hidden, code0, uniforms, top_p, limits = inputs
    return owner(hidden, code0, uniforms, top_p, top_k, running_sum_by_product, limits), ()


def _start(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, Code2Wav)
    codes, slots = inputs
    samples, new = owner.start(codes)
    return (samples,), _update_slots(state, slots, new)


def _step(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, Code2Wav)
    codes, slots = inputs
    samples, new = owner.step(codes, tuple(old.index_select(0, slots) for old in state))
    return (samples,), _update_slots(state, slots, new)


def _update_slots(state: State, slots: Tensor, new: State) -> State:
    """Return `state` with new values for `slots`, except the last, which is idle."""
    count = len(state[0])
    row, is_named = rows_by_slot(slots, count)

    def renewed(old: Tensor, given: Tensor) -> Tensor:
        named = is_named.view(-1, *[1] * (old.ndim - 1))
        return torch.where(named, given.index_select(0, row), old)

    return tuple(map(renewed, state, new))
