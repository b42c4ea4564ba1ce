"""Graphs of the other parts: encoders, projections, code predictor, code2wav."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.code2wav import UNIT_DILATIONS, Code2Wav
from qwen3_omni_neuron.model.config import (
    AudioEncoderConfig,
    Code2WavConfig,
    TalkerConfig,
    VisionEncoderConfig,
)
from qwen3_omni_neuron.model.kv_cache import rows_by_slot
from qwen3_omni_neuron.model.layers import widen
from qwen3_omni_neuron.neuron.graphs.graph import Graph, Outputs, State, TensorSpec


def audio_graph(c: AudioEncoderConfig, windows: int, dtype: torch.dtype) -> Graph:
    """Describe the audio encoder over a batch of 8-second windows of any clips."""
    frames, tokens = c.window_mel_frames, c.window_tokens
    return Graph(
        "audio_encoder",
        {"windows": windows},
        "audio_encoder",
        _encode,
        (
            TensorSpec("mel", (windows, c.mel_bins, frames), dtype),
            TensorSpec("valid", (windows, tokens), torch.bool, idle=True),
            TensorSpec(
                "chunk_width", (1,), torch.int64, c.chunk_mel_frames + 1, c.chunk_mel_frames
            ),
        ),
        (TensorSpec("rows", (windows, tokens, c.output_size), dtype),),
    )


def vision_graph(c: VisionEncoderConfig, patches: int, dtype: torch.dtype) -> Graph:
    """Describe the vision encoder over a frame, padded to `patches`."""
    rows = patches // c.merge_size**2
    return Graph(
        "vision_encoder",
        {"patches": patches},
        "vision_encoder",
        _encode,
        (
            TensorSpec("patches", (1, patches, c.patch_values), dtype),
            TensorSpec("places", (2, patches), torch.int64, c.positions_per_side),
            TensorSpec("grid", (2,), torch.int64, 2 * c.positions_per_side),
            TensorSpec("valid", (patches,), torch.bool, idle=True),
        ),
        (TensorSpec("rows", (1 + len(c.deepstack_layers), 1, rows, c.output_size), dtype),),
    )


def projection_graphs(c: TalkerConfig, rows: int, dtype: torch.dtype) -> Iterator[Graph]:
    """Describe the projections to talker rows: text rows, and the accept layer's media rows."""
    for name in ("text_projection", "hidden_projection"):
        yield Graph(
            name,
            {"rows": rows},
            name,
            _project,
            (TensorSpec("x", (rows, c.thinker_hidden_size), dtype),),
            (TensorSpec("rows", (rows, c.text.hidden_size), dtype),),
        )


def _encode(owner: nn.Module, inputs: tuple[Tensor, ...], _: State) -> tuple[Outputs, State]:
    return (owner(*inputs, attend),), ()


def _project(owner: nn.Module, inputs: tuple[Tensor, ...], _: State) -> tuple[Outputs, State]:
    return (owner(*inputs),), ()


def predictor_graph(
    c: TalkerConfig,
    slots: int,
    top_k: int,
    weights: torch.dtype,
    arithmetic: torch.dtype | None = None,
    step: tuple[TensorSpec, ...] = (),
) -> Graph:
    """Describe the code predictor: codes 1 to 15 of a frame for each of `slots` streams.

    top_k: upper bound of a stream's. weights, arithmetic: dtypes. step: inputs of the talker's next
    step, which are the outputs: its codes, its rows with the feedback added, and others as given.
    """
    width = c.predictor.hidden_size
    return Graph(
        "code_predictor",
        {"slots": slots, "top_k": top_k},
        "code_predictor",
        partial(_predict, top_k=top_k),
        (
            TensorSpec("hidden", (slots, width), arithmetic or weights),
            TensorSpec("code0", (slots,), torch.int64, c.predictor.vocab_size),
            TensorSpec("noise", (slots, c.code_groups - 1, c.predictor.vocab_size), torch.float32),
            TensorSpec("top_p", (slots,), torch.float32, 1, idle=1),
            TensorSpec("top_k", (slots,), torch.int64, top_k + 1, idle=1),
            *step[1:],
        ),
        step
        or (
            TensorSpec("codes", (slots, c.code_groups), torch.int64),
            TensorSpec("feedback", (slots, width), weights),
        ),
    )


def code2wav_graph(
    c: Code2WavConfig, streams: int, frames: int, slots: int, dtype: torch.dtype, kv_heads: int
) -> Graph:
    """Describe code2wav over a chunk of `frames` frames for each of `streams` streams.

    A padding row names and changes no slot. position: frames before the chunk; at 0 the slot is not
    read, and the first latency_samples are meaningless.
    """
    shapes = vocoder_state(c, kv_heads)
    values = sum(map(math.prod, shapes))
    return Graph(
        "code2wav",
        {"streams": streams, "frames": frames},
        "code2wav",
        partial(_decode, shapes=shapes),
        (
            TensorSpec("codes", (streams, c.code_groups, frames), torch.int64, c.codebook_size),
            TensorSpec("slots", (streams,), torch.int64, slots + 1, idle=slots),
            TensorSpec("position", (streams,), torch.int64, c.sliding_window),
        ),
        (TensorSpec("samples", (streams, frames * c.frame_samples), dtype),),
        (TensorSpec("state", (slots, values), dtype),),
    )


def vocoder_state(c: Code2WavConfig, kv_heads: int) -> list[tuple[int, ...]]:
    """Return the shapes of one stream's state except the position."""
    reach = kv_heads, c.sliding_window - 1, c.head_dim
    shapes: list[tuple[int, ...]] = [reach] * (2 * c.layers)
    shapes += [(c.hidden_size, 6)] * (len(c.upsampling_ratios) + 1)  # their convolutions, conv_in
    for block in range(len(c.upsample_rates)):
        width = c.decoder_dim // 2**block
        shapes += [(width, 1), *((width // 2, 6 * dilation) for dilation in UNIT_DILATIONS)]
    return [*shapes, (c.decoder_dim // 2 ** len(c.upsample_rates), 6)]


def _predict(
    owner: nn.Module, inputs: tuple[Tensor, ...], _: State, top_k: int
) -> tuple[Outputs, State]:
    hidden, code0, noise, top_p, limits, *step = inputs
    codes, feedback = owner(hidden, code0, noise, top_p, top_k, limits, by_sums=True)
    if step:
        feedback = step[0] + feedback.to(step[0].dtype)
    return (codes, feedback, *step[1:]), ()


def _decode(
    owner: nn.Module, inputs: tuple[Tensor, ...], state: State, shapes: Sequence[tuple[int, ...]]
) -> tuple[Outputs, State]:
    assert isinstance(owner, Code2Wav)
    codes, slots, position = inputs
    (held,) = state
    count, starts = len(held), position < 1
    rows = held.index_select(0, slots.clamp(0, count - 1)).masked_fill(starts[:, None], 0)
    held_state = (position, *_views(rows, shapes))
    samples, (_, *new) = owner.step(codes, held_state, starts, transposed_by_products)
    row, is_named = rows_by_slot(slots, count)
    given = torch.cat([tensor.flatten(1) for tensor in new], 1)
    if len(given) > 1:  # else every named slot's, without a copy for each
        given = given.index_select(0, row)
    return (samples,), (torch.where(is_named[:, None], given, held),)


def transposed_by_products(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Compute a transposed convolution by one product; see model.code2wav.Transposed.

    A compiler would multiply zeros between the inputs. The kernel is one stride or two.
    """
    # [streams, out * kernel, T] -> [streams, out, kernel / stride, stride, T]
    products = (weight.flatten(1).t() @ x).unflatten(1, (weight.shape[1], -1, stride))
    samples = products[:, :, 0]
    if products.shape[2] == 2:  # samples depend on the next and the previous input
        samples = samples[..., 1:] + products[:, :, 1, :, :-1]
    joined = samples.transpose(2, 3).flatten(2)  # [streams, out, stride * T]
    return joined if bias is None else joined + bias[:, None]


def _views(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    begin = 0
    for shape in shapes:
        length = math.prod(shape)
        yield rows.narrow(1, begin, length).unflatten(1, shape)
        begin += length


SCORES_BYTES = 64_000_000  # upper bound of a tensor of scores
HIDDEN = -3e4  # score of a hidden key: its weight is exactly 0, scaled or not
# Shapes that suit the kernel: the stricter of TorchNeuron's decompositions and later measurements.
KERNEL_ROWS, KERNEL_HEAD_DIM, KERNEL_HEADS = 512, 128, 512
EVEN = 16  # the kernel's head_dim is padded to a multiple of it


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend to the keys that a mask shows, with a softmax in float32; see model.layers.Attend.

    TorchNeuron's kernel has no mask, so a column of the heads replaces it. Other shapes run in
    blocks of queries: scores of two heads of 16,384 patches take 1 GB per layer.
    """
    scale = q.shape[3] ** -0.5
    widened = _hiding(q, k, v, mask)
    if suits_kernel(widened[0]):
        mixed = F.scaled_dot_product_attention(*widened, scale=scale)
        return mixed[..., : q.shape[3]]
    frames, heads, rows, _ = q.shape
    at_once = max(1, SCORES_BYTES // (frames * heads * rows * 4))
    blocks = [
        _by_products(q[:, :, start : start + at_once], k, v, mask, scale)
        for start in range(0, rows, at_once)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def suits_kernel(q: Tensor) -> bool:
    """Return whether a kernel computes attention without a mask. q: [frames, heads, rows, dim]."""
    frames, heads, rows, head_dim = q.shape
    is_small = head_dim <= KERNEL_HEAD_DIM and frames * heads <= KERNEL_HEADS
    return is_small and rows % KERNEL_ROWS == 0


def _hiding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widen heads by a column that replaces the mask: 1 in q, and in k 0 or HIDDEN."""
    columns = EVEN - q.shape[3] % EVEN  # 72 -> 80, 64 -> 80
    hidden = torch.where(mask, 0.0, HIDDEN).to(k.dtype).transpose(2, 3)  # [frames or 1, 1, rows, 1]
    hidden = hidden.expand(*k.shape[:3], 1)

    def constant(value: float, width: int) -> Tensor:
        return torch.full((*k.shape[:3], width), value, dtype=k.dtype, device=k.device)

    # TorchNeuron does not lower F.pad or ones_like.
    zeros = constant(0, columns - 1)
    return (
        torch.cat((q, constant(1, 1), zeros), 3),
        torch.cat((k, hidden, zeros), 3),
        torch.cat((v, constant(0, columns)), 3),
    )


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.where(mask, widen(q @ k.transpose(2, 3) * scale), HIDDEN)
    return torch.softmax(scores, 3).to(v.dtype) @ v
