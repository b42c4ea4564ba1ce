"""Replacement of a module's layers by parallel ones, and the cuts of its weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.modules import cast
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, AudioEncoderLayer
from qwen3_omni_neuron.model.code2wav import Upsample, VocoderLayer
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.decoder import Attention
from qwen3_omni_neuron.model.layers import FeedForward
from qwen3_omni_neuron.model.moe import SCALE, MoeFeedForward
from qwen3_omni_neuron.model.talker import ResizeMlp, TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.model.vision_encoder import PatchMerger, VisionLayer
from qwen3_omni_neuron.neuron.graphs.cut import (
    PAD,
    Cut,
    Units,
    cut_heads,
    cut_width,
    key_heads,
    query_heads,
    rank_width,
    whole,
)
from qwen3_omni_neuron.neuron.graphs.layers import (
    ColumnParallel,
    Group,
    ParallelMoe,
    RowParallel,
    product,
)

M = TypeVar("M", bound=nn.Module)


def parallelize(module: nn.Module, tp: int, group: Group) -> dict[str, Cut]:
    """Replace plain layers by parallel ones in a module on the meta device.

    Embeddings, norms, routers, convolutions and the code predictor's heads stay whole. Matrices
    become [in, out], also at tp 1. Returns the changed parameters' cuts. Raises OptionError if the
    KV heads and `tp` don't divide.
    """
    cuts: dict[str, Cut] = {}
    experts: list[str] = []  # prefixes of experts already replaced
    with torch.device("meta"):
        for name, layer in list(module.named_modules()):
            prefix = f"{name}." if name else ""
            if prefix.startswith(tuple(experts)):
                continue
            rule = RULES.get(type(layer))
            if rule is not None:
                cuts |= {prefix + own: cut for own, cut in rule(layer, tp, group).items()}
            for child_name, child in list(layer.named_children()):
                if type(child) is MoeFeedForward:
                    parallel, own_cuts = _moe(child, tp, group)
                    setattr(layer, child_name, parallel)
                    experts.append(f"{prefix}{child_name}.")
                    cuts |= {f"{experts[-1]}{own}": cut for own, cut in own_cuts.items()}
                elif isinstance(child, nn.Linear):
                    cuts |= {
                        prefix + own: cut for own, cut in _whole(layer, child_name, tp).items()
                    }
    return cuts


def _columns(layer: Any, name: str, cut: Cut) -> dict[str, Cut]:
    plain = getattr(layer, name)
    weight, bias = plain.weight, getattr(plain, "bias", None)
    parallel = ColumnParallel(weight.shape[1], cut.length, bias is not None)
    setattr(layer, name, _like(parallel, weight))
    return _weight_and_bias(name, cut, bias is not None)


def _whole(layer: Any, name: str, tp: int) -> dict[str, Cut]:
    return _columns(layer, name, whole(0, len(getattr(layer, name).weight), tp))


def _rows(layer: Any, name: str, cut: Cut, group: Group) -> dict[str, Cut]:
    plain = getattr(layer, name)
    weight, bias = plain.weight, getattr(plain, "bias", None)
    parallel = RowParallel(cut.length, weight.shape[0], bias is not None, group)
    setattr(layer, name, _like(parallel, weight))
    return {f"{name}.weight": replace(cut, axis=1, transposed=True)}


def _mlp(up: str, down: str, blocks: int = 1) -> Callable[[Any, int, Group], dict[str, Cut]]:
    def rule(layer: Any, tp: int, group: Group) -> dict[str, Cut]:
        width = getattr(layer, down).weight.shape[1]
        columns = _columns(layer, up, cut_width(0, [width] * blocks, tp))
        return columns | _rows(layer, down, cut_width(1, [width], tp), group)

    return rule


def _attention(
    layer: Any, heads: int, kv_heads: int, head_dim: int, tp: int, group: Group
) -> tuple[dict[str, Cut], list[Units], list[Units]]:
    queries, keys = query_heads(heads, kv_heads, tp), key_heads(heads, kv_heads, tp)
    qkv = [
        (*q, *_behind(k, heads), *_behind(k, heads + kv_heads))
        for q, k in zip(queries, keys, strict=True)
    ]
    cuts = _columns(layer, "qkv", cut_heads(0, head_dim, qkv))
    cuts |= _rows(layer, "out", cut_heads(1, head_dim, queries), group)
    layer.heads = len(queries[0])
    return cuts, queries, keys


def _encoder_layer(layer: Any, tp: int, group: Group) -> dict[str, Cut]:
    heads, width = layer.heads, layer.out.weight.shape[1]
    cuts, _, _ = _attention(layer, heads, heads, width // heads, tp, group)
    return cuts | _mlp("fc1", "fc2")(layer, tp, group)


def _vocoder_layer(layer: VocoderLayer, tp: int, group: Group) -> dict[str, Cut]:
    sizes = layer.heads, layer.kv_heads, layer.head_dim
    cuts, _, keys = _attention(layer, *sizes, tp, group)
    layer.kv_heads = len(keys[0])
    return cuts


def _decoder_attention(layer: Attention, tp: int, group: Group) -> dict[str, Cut]:
    heads, kv_heads = layer.heads, layer.kv_heads
    cuts, queries, keys = _attention(layer, heads, kv_heads, layer.head_dim, tp, group)
    layer.kv_heads = len(keys[0])
    normed = [(*q, *_behind(k, heads)) for q, k in zip(queries, keys, strict=True)]
    weight = layer.qk_norm.weight
    layer.qk_norm.weight = nn.Parameter(
        weight.new_empty(len(normed[0]), layer.head_dim), requires_grad=False
    )
    return cuts | {"qk_norm.weight": cut_heads(0, 1, normed)}


def _gathered(name: str) -> Callable[[Any, int, Group], dict[str, Cut]]:
    def rule(layer: Any, tp: int, group: Group) -> dict[str, Cut]:
        weight = getattr(layer, name).weight
        out, into = weight.shape
        cut = cut_width(0, [out], tp)
        parallel = ColumnParallel(into, cut.length, False, group, out)
        setattr(layer, name, _like(parallel, weight))
        return _weight_and_bias(name, cut, False)

    return rule


def _predictor(layer: CodePredictor, tp: int, group: Group) -> dict[str, Cut]:
    layer.head, layer.project = nn.Parameter(layer.head.mT.contiguous()), product
    return {"head": replace(whole(1, layer.head.shape[2], tp), transposed=True)}


def _moe(layer: MoeFeedForward, tp: int, group: Group) -> tuple[ParallelMoe, dict[str, Cut]]:
    experts, hidden, width = layer.down.shape
    gate_up = cut_width(1, [width, width], tp)
    cuts = {
        "router.weight": whole(0, experts, tp),
        "gate_up": gate_up,
        "down": cut_width(2, [width], tp),
    }
    shared = 0
    if layer.shared is not None:
        shared = layer.shared.ffn.down.weight.shape[1]
        cuts["shared.gate.weight"] = whole(0, 1, tp)
        cuts["shared.ffn.gate_up.weight"] = cut_width(0, [shared, shared], tp)
        cuts["shared.ffn.down.weight"] = cut_width(1, [shared], tp)
    cuts = {name: replace(cut, transposed=True) for name, cut in cuts.items()}
    if layer.int8:
        # Scales of outputs. A rank has all outputs of `down`, each a sum over its inputs.
        cuts["gate_up" + SCALE] = gate_up
    own = MoeConfig(
        experts,
        layer.experts_per_token,
        rank_width(width, tp),
        layer.normalize_weights,
        rank_width(shared, tp),
        layer.static,
        layer.int8,
    )
    return _like(ParallelMoe(hidden, own, group), layer.router.weight), cuts


def _feed_forward(layer: FeedForward, tp: int, group: Group) -> dict[str, Cut]:
    return _mlp("gate_up", "down", 2)(layer, tp, group)


RULES: dict[type[nn.Module], Callable[[Any, int, Group], dict[str, Cut]]] = {
    AudioEncoder: _mlp("fc1", "fc2"),
    AudioEncoderLayer: _encoder_layer,
    VisionLayer: _encoder_layer,
    PatchMerger: _mlp("fc1", "fc2"),
    ResizeMlp: _mlp("fc1", "fc2"),
    Attention: _decoder_attention,
    FeedForward: _feed_forward,
    VocoderLayer: _vocoder_layer,
    Upsample: _mlp("fc1", "fc2"),
    CodePredictor: _predictor,
    ThinkerModel: _gathered("head"),
    TalkerModel: _gathered("codec_head"),
}


def _behind(units: Units, offset: int) -> Units:
    return tuple(unit if unit == PAD else unit + offset for unit in units)


def _weight_and_bias(name: str, cut: Cut, bias: bool) -> dict[str, Cut]:
    weight = {f"{name}.weight": replace(cut, transposed=True)}
    return weight | ({f"{name}.bias": cut} if bias else {})


def _like(module: M, weight: torch.Tensor) -> M:
    cast(module, weight.dtype)
    return module
