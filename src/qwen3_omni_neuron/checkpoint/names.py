"""Released parameter names, mapped to the parameters of model/.

A parameter is filled from pieces: stored tensors and the regions that they fill. Gate and up, or q,
k and v, are stored separately and computed as one matrix; experts as one stack.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from qwen3_omni_neuron.model.config import (
    AudioEncoderConfig,
    Code2WavConfig,
    DecoderConfig,
    TalkerConfig,
    ThinkerConfig,
    VisionEncoderConfig,
)

EMBEDDING = "thinker.model.embed_tokens.weight"
CODEC_EMBEDDING = "talker.model.codec_embedding.weight"

Region = tuple[slice | int, ...]
"""Index of a parameter's part that a stored tensor fills."""


@dataclass(frozen=True)
class Piece:
    """One stored tensor: released name, region, and conversion."""

    name: str
    region: Region = ()
    convert: Callable[[Tensor], Tensor] | None = None


Pieces = Iterator[tuple[str, list[Piece]]]
"""Each parameter's name, with its pieces."""


def embedding_pieces() -> Pieces:
    """Yield the pieces of the thinker's token embedding, an nn.Embedding."""
    yield "weight", [Piece(EMBEDDING)]


def codec_embedding_pieces() -> Pieces:
    """Yield the pieces of the talker's codec embedding, an nn.Embedding."""
    yield "weight", [Piece(CODEC_EMBEDDING)]


def thinker_pieces(c: ThinkerConfig) -> Pieces:
    """Yield the pieces of model.thinker.ThinkerModel."""
    yield "embedding.weight", [Piece(EMBEDDING)]
    yield from _decoder("decoder", "thinker.model", c.text)
    yield "head.weight", [Piece("thinker.lm_head.weight")]


def audio_encoder_pieces(c: AudioEncoderConfig) -> Pieces:
    """Yield the pieces of model.audio_encoder.AudioEncoder."""
    stored = "thinker.audio_tower"
    for index in (1, 2, 3):
        yield from _same(f"conv{index}", f"{stored}.conv2d{index}")
    yield "conv_out.weight", [Piece(f"{stored}.conv_out.weight")]
    width = c.hidden_size
    for layer in range(c.layers):
        ours, theirs = f"layers.{layer}", f"{stored}.layers.{layer}"
        for kind in ("weight", "bias"):
            yield (
                f"{ours}.qkv.{kind}",
                [
                    Piece(f"{theirs}.self_attn.{name}.{kind}", _rows(i * width, width))
                    for i, name in enumerate(("q_proj", "k_proj", "v_proj"))
                ],
            )
        yield from _same(f"{ours}.out", f"{theirs}.self_attn.out_proj")
        yield from _same(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm")
        yield from _same(f"{ours}.fc1", f"{theirs}.fc1")
        yield from _same(f"{ours}.fc2", f"{theirs}.fc2")
        yield from _same(f"{ours}.ffn_norm", f"{theirs}.final_layer_norm")
    yield from _same("norm", f"{stored}.ln_post")
    yield from _same("fc1", f"{stored}.proj1")
    yield from _same("fc2", f"{stored}.proj2")


def vision_encoder_pieces(c: VisionEncoderConfig) -> Pieces:
    """Yield the pieces of model.vision_encoder.VisionEncoder."""
    stored = "thinker.visual"
    patch = Piece(f"{stored}.patch_embed.proj.weight", convert=_flat_rows)
    yield "patch_embedding.weight", [patch]
    yield "patch_embedding.bias", [Piece(f"{stored}.patch_embed.proj.bias")]
    yield "position_embedding.weight", [Piece(f"{stored}.pos_embed.weight")]
    for layer in range(c.layers):
        ours, theirs = f"layers.{layer}", f"{stored}.blocks.{layer}"
        yield from _same(f"{ours}.attention_norm", f"{theirs}.norm1")
        yield from _same(f"{ours}.qkv", f"{theirs}.attn.qkv")
        yield from _same(f"{ours}.out", f"{theirs}.attn.proj")
        yield from _same(f"{ours}.ffn_norm", f"{theirs}.norm2")
        yield from _same(f"{ours}.fc1", f"{theirs}.mlp.linear_fc1")
        yield from _same(f"{ours}.fc2", f"{theirs}.mlp.linear_fc2")
    mergers = [("merger", "merger")]
    for index in range(len(c.deepstack_layers)):
        mergers.append((f"deepstack_mergers.{index}", f"merger_list.{index}"))
    for ours, theirs in mergers:
        yield from _same(f"{ours}.norm", f"{stored}.{theirs}.ln_q")
        yield from _same(f"{ours}.fc1", f"{stored}.{theirs}.mlp.0")
        yield from _same(f"{ours}.fc2", f"{stored}.{theirs}.mlp.2")


def talker_pieces(c: TalkerConfig) -> Pieces:
    """Yield the pieces of model.talker.TalkerModel."""
    yield "codec_embedding.weight", [Piece(CODEC_EMBEDDING)]
    yield from _decoder("decoder", "talker.model", c.text)
    yield "codec_head.weight", [Piece("talker.codec_head.weight")]


def projection_pieces(name: str) -> Pieces:
    """Yield the pieces of a model.talker.ResizeMlp.

    name: "text_projection" or "hidden_projection".
    """
    yield from _same("fc1", f"talker.{name}.linear_fc1")
    yield from _same("fc2", f"talker.{name}.linear_fc2")


def code_predictor_pieces(c: TalkerConfig) -> Pieces:
    """Yield the pieces of model.code_predictor.CodePredictor, without its table of code 0."""
    stored = "talker.code_predictor"
    yield from _decoder("decoder", f"{stored}.model", c.predictor)
    groups = range(c.code_groups - 1)
    tables = [Piece(f"{stored}.model.codec_embedding.{g}.weight", (g,)) for g in groups]
    yield "embedding", tables
    yield "head", [Piece(f"{stored}.lm_head.{g}.weight", (g,)) for g in groups]


def code2wav_pieces(c: Code2WavConfig) -> Pieces:
    """Yield the pieces of model.code2wav.Code2Wav."""
    yield "embedding.weight", [Piece("code2wav.code_embedding.weight")]
    for layer in range(c.layers):
        ours, theirs = f"layers.{layer}", f"code2wav.pre_transformer.layers.{layer}"
        yield from _attention(ours, theirs, c.heads, c.kv_heads, c.head_dim)
        yield from _feed_forward(f"{ours}.ffn", f"{theirs}.mlp", c.ffn_width)
        yield f"{ours}.attention_scale", [Piece(f"{theirs}.self_attn_layer_scale.scale")]
        yield f"{ours}.ffn_scale", [Piece(f"{theirs}.mlp_layer_scale.scale")]
        yield from _layer_norms(ours, theirs)
    yield "norm.weight", [Piece("code2wav.pre_transformer.norm.weight")]
    for stage in range(len(c.upsampling_ratios)):
        ours, theirs = f"upsample.{stage}", f"code2wav.upsample.{stage}"
        yield from _same(f"{ours}.conv", f"{theirs}.0.conv")
        yield from _same(f"{ours}.depthwise", f"{theirs}.1.dwconv.conv")
        yield from _same(f"{ours}.norm", f"{theirs}.1.norm")
        yield from _same(f"{ours}.fc1", f"{theirs}.1.pwconv1")
        yield from _same(f"{ours}.fc2", f"{theirs}.1.pwconv2")
        yield f"{ours}.scale", [Piece(f"{theirs}.1.gamma")]
    yield from _same("conv_in", "code2wav.decoder.0.conv")
    blocks = len(c.upsample_rates)
    for block in range(blocks):
        ours, theirs = f"blocks.{block}", f"code2wav.decoder.{block + 1}.block"
        yield from _snake(f"{ours}.act", f"{theirs}.0")
        yield from _same(f"{ours}.upsample", f"{theirs}.1.conv")
        for unit in range(3):
            for act, conv in (("act1", "conv1"), ("act2", "conv2")):
                name = f"{theirs}.{unit + 2}"
                yield from _snake(f"{ours}.units.{unit}.{act}", f"{name}.{act}")
                yield from _same(f"{ours}.units.{unit}.{conv}", f"{name}.{conv}.conv")
    yield from _snake("act_out", f"code2wav.decoder.{blocks + 1}")
    yield from _same("conv_out", f"code2wav.decoder.{blocks + 2}.conv")


def _decoder(ours: str, theirs: str, c: DecoderConfig) -> Pieces:
    for layer in range(c.layers):
        mine, stored = f"{ours}.layers.{layer}", f"{theirs}.layers.{layer}"
        yield from _attention(f"{mine}.attention", stored, c.heads, c.kv_heads, c.head_dim)
        yield (
            f"{mine}.attention.qk_norm.weight",
            [
                Piece(f"{stored}.self_attn.q_norm.weight", _rows(0, c.heads)),
                Piece(f"{stored}.self_attn.k_norm.weight", _rows(c.heads, c.kv_heads)),
            ],
        )
        yield from _layer_norms(mine, stored)
        if c.moe is None:
            yield from _feed_forward(f"{mine}.ffn", f"{stored}.mlp", c.ffn_width)
            continue
        yield f"{mine}.ffn.router.weight", [Piece(f"{stored}.mlp.gate.weight")]
        width, experts = c.moe.expert_width, range(c.moe.experts)
        yield (
            f"{mine}.ffn.gate_up",
            [
                Piece(f"{stored}.mlp.experts.{e}.{name}.weight", (e, *_rows(start, width)))
                for e in experts
                for name, start in (("gate_proj", 0), ("up_proj", width))
            ],
        )
        stack = f"{stored}.mlp.experts"
        yield (
            f"{mine}.ffn.down",
            [Piece(f"{stack}.{e}.down_proj.weight", (e,)) for e in experts],
        )
        if shared := c.moe.shared_expert_width:
            name = f"{stored}.mlp.shared_expert"
            yield from _feed_forward(f"{mine}.ffn.shared.ffn", name, shared)
            yield f"{mine}.ffn.shared.gate.weight", [Piece(f"{name}_gate.weight")]
    yield f"{ours}.norm.weight", [Piece(f"{theirs}.norm.weight")]


def _attention(ours: str, theirs: str, heads: int, kv_heads: int, head_dim: int) -> Pieces:
    q, kv = heads * head_dim, kv_heads * head_dim
    yield (
        f"{ours}.qkv.weight",
        [
            Piece(f"{theirs}.self_attn.q_proj.weight", _rows(0, q)),
            Piece(f"{theirs}.self_attn.k_proj.weight", _rows(q, kv)),
            Piece(f"{theirs}.self_attn.v_proj.weight", _rows(q + kv, kv)),
        ],
    )
    yield f"{ours}.out.weight", [Piece(f"{theirs}.self_attn.o_proj.weight")]


def _layer_norms(ours: str, theirs: str) -> Pieces:
    yield f"{ours}.attention_norm.weight", [Piece(f"{theirs}.input_layernorm.weight")]
    yield f"{ours}.ffn_norm.weight", [Piece(f"{theirs}.post_attention_layernorm.weight")]


def _feed_forward(ours: str, theirs: str, width: int) -> Pieces:
    yield (
        f"{ours}.gate_up.weight",
        [
            Piece(f"{theirs}.gate_proj.weight", _rows(0, width)),
            Piece(f"{theirs}.up_proj.weight", _rows(width, width)),
        ],
    )
    yield f"{ours}.down.weight", [Piece(f"{theirs}.down_proj.weight")]


def _same(ours: str, theirs: str) -> Pieces:
    for kind in ("weight", "bias"):
        yield f"{ours}.{kind}", [Piece(f"{theirs}.{kind}")]


def _snake(ours: str, theirs: str) -> Pieces:
    yield f"{ours}.frequency", [Piece(f"{theirs}.alpha", convert=_exp)]
    yield f"{ours}.inverse_magnitude", [Piece(f"{theirs}.beta", convert=_inverse_exp)]


def _flat_rows(kernel: Tensor) -> Tensor:
    return kernel.flatten(1)


def _exp(alpha: Tensor) -> Tensor:
    return alpha.float().exp()[:, None]


def _inverse_exp(beta: Tensor) -> Tensor:
    return (1 / (beta.float().exp() + 1e-9))[:, None]


def _rows(start: int, count: int) -> Region:
    return (slice(start, start + count),)
