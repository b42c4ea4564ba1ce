"""Random parameters of a tiny checkpoint, by released name.

Every weight and every bias is random and not zero, so that a test notices a term that is missing.
The gains keep each module's output at the scale of its input: logits are neither flat nor one-hot,
audio is neither silent nor clipped.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qwen3_omni_neuron.checkpoint.drawn import draw

Config = dict[str, Any]
Weights = Callable[[Config, str, torch.Tensor], None]
NamedShapes = Iterator[tuple[str, tuple[int, ...]]]

LOGIT_SCALE = 2.0  # standard deviation of every head's logits
# Residual units and snake activations add to their input: these gains are small enough that the
# audio has an RMS of about 0.1.
_AUDIO_GAINS = {"conv2": 0.3, "code2wav.decoder.6.conv.weight": 0.05}


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the released layout by name, experts one by one."""
    return dict(
        (
            *_audio_tower(config["thinker_config"]["audio_config"]),
            *_visual(config["thinker_config"]["vision_config"]),
            *_thinker_text(config["thinker_config"]["text_config"]),
            *_talker(config["talker_config"]),
            *_code2wav(config["code2wav_config"]),
        )
    )


def random_weights(seed: int) -> Weights:
    """Return random weights from a seed; the model's replies don't end at once."""

    def weights(config: Config, name: str, parameter: torch.Tensor) -> None:
        draw(parameter, name, seed, *drawing(config, name, tuple(parameter.shape)))

    return weights


def drawing(config: Config, name: str, shape: tuple[int, ...]) -> tuple[float, float, int | None]:
    """Return the mean and deviation of a parameter, and the row that ends a reply or None."""
    end_rows = {
        "thinker.lm_head.weight": config["im_end_token_id"],
        "talker.codec_head.weight": config["talker_config"]["codec_eos_token_id"],
    }
    return *_mean_and_deviation(name, shape), end_rows.get(name)


def _mean_and_deviation(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if _is_norm_weight(name):
        return 1, 0.1
    if name.endswith((".alpha", ".beta", ".bias")):
        return 0, 0.1
    if name.endswith((".scale", ".gamma")):
        return 0.3, 0.1
    if "embed" in name or "embedding" in name:
        return 0, 1
    if name.endswith(".mlp.gate.weight"):
        return 0, 2.0 / math.sqrt(shape[1])
    if name.endswith(("lm_head.weight", "codec_head.weight")) or ".lm_head." in name:
        return 0, LOGIT_SCALE / math.sqrt(shape[1])
    gain = _AUDIO_GAINS.get(name.rsplit(".", 4)[-3] if ".block." in name else name, 1.0)
    return 0, gain / math.sqrt(_fan_in(name, shape))


def _is_norm_weight(name: str) -> bool:
    owner = name.rsplit(".", 2)[-2] if name.count(".") else ""
    return name.endswith(".weight") and ("norm" in owner or owner in ("ln_post", "ln_q"))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 3 and ".conv.weight" in name and _is_transposed(name):
        # ConvTranspose1d [in, out, kernel]: each output sums in * kernel / stride products; the
        # kernel is one stride in `upsample` and two in the decoder's blocks.
        return shape[0] * (1 if ".upsample." in name else 2)
    return math.prod(shape[1:]) if len(shape) > 1 else 1


def _is_transposed(name: str) -> bool:
    return (".upsample." in name and ".0.conv." in name) or ".block.1.conv." in name


def _linear(name: str, out: int, into: int, bias: bool) -> NamedShapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _layer_norm(name: str, width: int) -> NamedShapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _gated_mlp(name: str, hidden: int, width: int) -> NamedShapes:
    yield from _linear(f"{name}.gate_proj", width, hidden, False)
    yield from _linear(f"{name}.up_proj", width, hidden, False)
    yield from _linear(f"{name}.down_proj", hidden, width, False)


def _attention(
    name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool
) -> NamedShapes:
    yield from _linear(f"{name}.q_proj", heads * head_dim, hidden, False)
    yield from _linear(f"{name}.k_proj", kv_heads * head_dim, hidden, False)
    yield from _linear(f"{name}.v_proj", kv_heads * head_dim, hidden, False)
    yield from _linear(f"{name}.o_proj", hidden, heads * head_dim, False)
    if qk_norm:
        yield f"{name}.q_norm.weight", (head_dim,)
        yield f"{name}.k_norm.weight", (head_dim,)


def _decoder_layer(name: str, c: dict[str, Any]) -> NamedShapes:
    """Yield attention and norms of one layer of a thinker, talker or code predictor."""
    hidden = c["hidden_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield from _attention(f"{name}.self_attn", hidden, heads, kv_heads, c["head_dim"], True)
    yield f"{name}.input_layernorm.weight", (hidden,)
    yield f"{name}.post_attention_layernorm.weight", (hidden,)


def _experts(name: str, c: dict[str, Any]) -> NamedShapes:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    yield f"{name}.gate.weight", (c["num_experts"], hidden)
    for expert in range(c["num_experts"]):
        yield from _gated_mlp(f"{name}.experts.{expert}", hidden, width)


def _audio_tower(c: dict[str, Any]) -> NamedShapes:
    prefix, width, channels = "thinker.audio_tower", c["d_model"], c["downsample_hidden_size"]
    for layer in range(c["encoder_layers"]):
        name = f"{prefix}.layers.{layer}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{name}.self_attn.{projection}", width, width, True)
        yield from _layer_norm(f"{name}.self_attn_layer_norm", width)
        yield from _linear(f"{name}.fc1", c["encoder_ffn_dim"], width, True)
        yield from _linear(f"{name}.fc2", width, c["encoder_ffn_dim"], True)
        yield from _layer_norm(f"{name}.final_layer_norm", width)
    yield from _layer_norm(f"{prefix}.ln_post", width)
    for index, into in ((1, 1), (2, channels), (3, channels)):
        yield f"{prefix}.conv2d{index}.weight", (channels, into, 3, 3)
        yield f"{prefix}.conv2d{index}.bias", (channels,)
    mels = c["num_mel_bins"]
    for _ in range(3):
        mels = (mels + 1) // 2
    yield from _linear(f"{prefix}.conv_out", width, channels * mels, False)
    yield from _linear(f"{prefix}.proj1", width, width, True)
    yield from _linear(f"{prefix}.proj2", c["output_dim"], width, True)


def _visual(c: dict[str, Any]) -> NamedShapes:
    prefix, hidden = "thinker.visual", c["hidden_size"]
    merged = hidden * c["spatial_merge_size"] ** 2
    mergers = [f"merger_list.{i}" for i in range(len(c["deepstack_visual_indexes"]))]
    for merger, norm_width in ((m, merged) for m in mergers):
        yield from _merger(f"{prefix}.{merger}", norm_width, merged, c["out_hidden_size"])
    patch = (c["temporal_patch_size"], c["patch_size"], c["patch_size"])
    yield f"{prefix}.patch_embed.proj.weight", (hidden, c["in_channels"], *patch)
    yield f"{prefix}.patch_embed.proj.bias", (hidden,)
    yield f"{prefix}.pos_embed.weight", (c["num_position_embeddings"], hidden)
    for layer in range(c["depth"]):
        name = f"{prefix}.blocks.{layer}"
        yield from _layer_norm(f"{name}.norm1", hidden)
        yield from _layer_norm(f"{name}.norm2", hidden)
        yield from _linear(f"{name}.attn.qkv", 3 * hidden, hidden, True)
        yield from _linear(f"{name}.attn.proj", hidden, hidden, True)
        yield from _linear(f"{name}.mlp.linear_fc1", c["intermediate_size"], hidden, True)
        yield from _linear(f"{name}.mlp.linear_fc2", hidden, c["intermediate_size"], True)
    yield from _merger(f"{prefix}.merger", hidden, merged, c["out_hidden_size"])


def _merger(name: str, norm_width: int, merged: int, out: int) -> NamedShapes:
    yield from _layer_norm(f"{name}.ln_q", norm_width)
    yield from _linear(f"{name}.mlp.0", merged, merged, True)
    yield from _linear(f"{name}.mlp.2", out, merged, True)


def _thinker_text(c: dict[str, Any]) -> NamedShapes:
    prefix, hidden = "thinker.model", c["hidden_size"]
    yield f"{prefix}.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        yield from _decoder_layer(f"{prefix}.layers.{layer}", c)
        yield from _experts(f"{prefix}.layers.{layer}.mlp", c)
    yield f"{prefix}.norm.weight", (hidden,)
    yield "thinker.lm_head.weight", (c["vocab_size"], hidden)


def _talker(c: dict[str, Any]) -> NamedShapes:
    text, predictor = c["text_config"], c["code_predictor_config"]
    hidden, width = text["hidden_size"], text["intermediate_size"]
    for layer in range(text["num_hidden_layers"]):
        name = f"talker.model.layers.{layer}"
        yield from _decoder_layer(name, text)
        yield from _experts(f"{name}.mlp", text)
        shared = text["shared_expert_intermediate_size"]
        yield from _gated_mlp(f"{name}.mlp.shared_expert", hidden, shared)
        yield f"{name}.mlp.shared_expert_gate.weight", (1, hidden)
    yield "talker.model.norm.weight", (hidden,)
    yield "talker.model.codec_embedding.weight", (text["vocab_size"], hidden)
    for projection in ("text_projection", "hidden_projection"):
        name = f"talker.{projection}"
        yield from _linear(f"{name}.linear_fc1", width, c["thinker_hidden_size"], True)
        yield from _linear(f"{name}.linear_fc2", hidden, width, True)
    yield "talker.codec_head.weight", (text["vocab_size"], hidden)
    yield from _code_predictor(predictor)


def _code_predictor(c: dict[str, Any]) -> NamedShapes:
    prefix = "talker.code_predictor"
    for layer in range(c["num_hidden_layers"]):
        name = f"{prefix}.model.layers.{layer}"
        yield from _decoder_layer(name, c)
        yield from _gated_mlp(f"{name}.mlp", c["hidden_size"], c["intermediate_size"])
    yield f"{prefix}.model.norm.weight", (c["hidden_size"],)
    for group in range(c["num_code_groups"] - 1):
        table = (c["vocab_size"], c["hidden_size"])
        yield f"{prefix}.model.codec_embedding.{group}.weight", table
        yield f"{prefix}.lm_head.{group}.weight", table


def _code2wav(c: dict[str, Any]) -> NamedShapes:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    for layer in range(c["num_hidden_layers"]):
        name = f"code2wav.pre_transformer.layers.{layer}"
        kv_heads = c["num_key_value_heads"]
        yield from _attention(f"{name}.self_attn", hidden, heads, kv_heads, hidden // heads, False)
        yield from _gated_mlp(f"{name}.mlp", hidden, c["intermediate_size"])
        for part in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"{name}.{part}", (hidden,)
        for part in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            yield f"{name}.{part}", (hidden,)
    yield "code2wav.pre_transformer.norm.weight", (hidden,)
    table = (c["codebook_size"] * c["num_quantizers"], hidden)
    yield "code2wav.code_embedding.weight", table
    for stage, factor in enumerate(c["upsampling_ratios"]):
        name = f"code2wav.upsample.{stage}"
        yield from _conv(f"{name}.0", (hidden, hidden, factor), hidden)
        yield from _conv(f"{name}.1.dwconv", (hidden, 1, 7), hidden)
        yield from _layer_norm(f"{name}.1.norm", hidden)
        yield from _linear(f"{name}.1.pwconv1", 4 * hidden, hidden, True)
        yield from _linear(f"{name}.1.pwconv2", hidden, 4 * hidden, True)
        yield f"{name}.1.gamma", (hidden,)
    yield from _wave_decoder(c)


def _wave_decoder(c: dict[str, Any]) -> NamedShapes:
    width = c["decoder_dim"]
    yield from _conv("code2wav.decoder.0", (width, c["hidden_size"], 7), width)
    for stage, rate in enumerate(c["upsample_rates"], start=1):
        name, into, width = f"code2wav.decoder.{stage}.block", width, width // 2
        yield from _snake(f"{name}.0", into)
        yield from _conv(f"{name}.1", (into, width, 2 * rate), width)
        for unit in (2, 3, 4):
            yield from _snake(f"{name}.{unit}.act1", width)
            yield from _conv(f"{name}.{unit}.conv1", (width, width, 7), width)
            yield from _snake(f"{name}.{unit}.act2", width)
            yield from _conv(f"{name}.{unit}.conv2", (width, width, 1), width)
    stages = len(c["upsample_rates"])
    yield from _snake(f"code2wav.decoder.{stages + 1}", width)
    yield from _conv(f"code2wav.decoder.{stages + 2}", (1, width, 7), 1)


def _conv(name: str, weight: tuple[int, ...], out: int) -> NamedShapes:
    yield f"{name}.conv.weight", weight
    yield f"{name}.conv.bias", (out,)


def _snake(name: str, width: int) -> NamedShapes:
    yield f"{name}.alpha", (width,)
    yield f"{name}.beta", (width,)
