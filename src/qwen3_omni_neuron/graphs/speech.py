"""The graphs of the code predictor and of code2wav."""

from functools import partial

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.config import Code2WavConfig, TalkerConfig
from qwen3_omni_neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.model.code2wav import UNIT_DILATIONS, Code2Wav
from qwen3_omni_neuron.model.sampler import running_sum_by_product


def predictor_graph(c: TalkerConfig, slots: Axis, top_k: int, dtype: torch.dtype) -> Graph:
    """The other 15 codes of a frame of `slots` streams. top_k 0: greedy."""
    width = c.predictor.hidden_size
    inputs = [
        TensorSpec("hidden", (slots, width), dtype),
        TensorSpec("code0", (slots,), torch.int64, c.predictor.vocab_size),
    ]
    if top_k:
        inputs += [
            TensorSpec("uniforms", (slots, c.code_groups - 1), torch.float32, 1),
            TensorSpec("top_p", (slots,), torch.float32, 1),
        ]
    return Graph(
        f"code_predictor_{'sampled' if top_k else 'greedy'}",
        {"slots": slots},
        "code_predictor",
        partial(_predict, top_k=top_k),
        tuple(inputs),
        (
            TensorSpec("codes", (slots, c.code_groups), torch.int64),
            TensorSpec("feedback", (slots, width), dtype),
        ),
    )


def code2wav_graph(
    c: Code2WavConfig, streams: Axis, frames: int, first: bool, dtype: torch.dtype, kv_heads: int
) -> Graph:
    """A chunk of `frames` of each stream. first: the streams' first one, which gives the state.

    kv_heads: those that this core holds.
    """
    state = vocoder_state(c, streams, dtype, kv_heads)
    samples = frames * c.frame_samples - (c.latency_samples if first else 0)
    outputs = [TensorSpec("samples", (streams, samples), dtype)]
    return Graph(
        f"code2wav_{'start' if first else 'step'}",
        {"streams": streams, "frames": frames},
        "code2wav",
        _start if first else _step,
        (TensorSpec("codes", (streams, c.code_groups, frames), torch.int64, c.codebook_size),),
        tuple(outputs) + (state if first else ()),
        () if first else state,
    )


def vocoder_state(
    c: Code2WavConfig, streams: Axis, dtype: torch.dtype, kv_heads: int
) -> tuple[TensorSpec, ...]:
    """In the order of model.code2wav.State."""
    specs = [TensorSpec("position", (streams,), torch.int64, c.sliding_window)]
    reach = (streams, kv_heads, c.sliding_window - 1, c.head_dim)
    for layer in range(c.layers):
        specs += [TensorSpec(f"{kind}.{layer}", reach, dtype) for kind in ("keys", "values")]

    def conv(name: str, channels: int, inputs: int) -> None:
        specs.append(TensorSpec(name, (streams, channels, inputs), dtype))

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
    owner: nn.Module, inputs: tuple[Tensor, ...], _: State, top_k: int
) -> tuple[Outputs, State]:
    if not top_k:
        return owner(*inputs), ()
    return owner(*inputs, top_k=top_k, running_sum=running_sum_by_product), ()


def _start(owner: nn.Module, inputs: tuple[Tensor, ...], _: State) -> tuple[Outputs, State]:
    assert isinstance(owner, Code2Wav)
    (codes,) = inputs
    samples, state = owner.start(codes)
    return (samples, *state), ()


def _step(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, Code2Wav)
    (codes,) = inputs
    samples, new = owner.step(codes, state)
    return (samples,), new
