"""The decoder of thinker and talker, over NxDI's parallel layers; see model.decoder.Decoder."""

import torch
from neuronx_distributed.modules.moe.shared_experts import SharedExperts
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from neuronx_distributed_inference.models.qwen3_moe.modeling_qwen3_moe import get_rmsnorm_cls
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import DecoderConfig, RopeConfig
from qwen3_omni_neuron.model.rotary import Rotary
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import IDLE
from qwen3_omni_neuron.neuron.nxdi.inference_config import DecoderInferenceConfig


class DecoderModel(NeuronBaseModel):
    """The module that NxDI traces: layers, norm, head, and the thinker's embedding."""

    config: DecoderInferenceConfig

    def setup_attr_for_model(self, config: DecoderInferenceConfig) -> None:
        """Set the sizes that NxDI's base class reads."""
        c = config.decoder
        # Sampling is on the host: it has penalties, a seed, suppressed ids.
        self.on_device_sampling = False
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = c.hidden_size
        self.num_attention_heads = c.heads
        self.num_key_value_heads = c.kv_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets

    def init_model(self, config: DecoderInferenceConfig) -> None:
        """Create the modules."""
        c, dtype = config.decoder, config.neuron_config.torch_dtype
        self.embed_tokens: nn.Module | None = None
        if not config.takes_rows:
            self.embed_tokens = ParallelEmbedding(
                c.vocab_size, c.hidden_size, dtype=dtype, shard_across_embedding=True, pad=True
            )
        self.layers = nn.ModuleList(NxdiDecoderLayer(config) for _ in range(c.layers))
        self.norm = get_rmsnorm_cls()(c.hidden_size, eps=c.norm_eps)
        self.lm_head = ColumnParallelLinear(
            c.hidden_size, c.vocab_size, bias=False, gather_output=True, pad=True, dtype=dtype
        )
        self._captured: list[Tensor] = []
        self._hook_capture(config)

    def init_inference_optimization(self, config: DecoderInferenceConfig) -> None:
        """Create the KV cache."""
        self.kv_mgr = SlotKvCache(
            config, num_kv_head=self.num_key_value_heads, global_rank=self.rank_util
        )

    def encode_vision_to_input(
        self, inputs_embeds: Tensor, vision_embeddings: Tensor, vision_mask: Tensor
    ) -> Tensor:
        """Insert media rows. All are [1, S, hidden], except vision_mask [1, S, 1]."""
        return torch.where(vision_mask > 0, vision_embeddings, inputs_embeds)

    def deepstack_process_xla(
        self, hidden_states: Tensor, visual_embeds: Tensor, vision_mask_positions: Tensor
    ) -> Tensor:
        """Add image rows [1, S, hidden] to a layer's output."""
        return hidden_states + visual_embeds.to(hidden_states.dtype)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Return logits [B, 1, vocab], captured states [B, rows, hidden], the new KV cache."""
        self._captured.clear()
        logits, *new_cache = super().forward(*inputs)
        (captured,) = self._captured
        return [logits, captured, *new_cache]

    def _hook_capture(self, config: DecoderInferenceConfig) -> None:
        """Capture hidden states, in every graph.

        NxDI's own needs sampling on the device, and loses its modules after the first bucket.
        """
        module = self.get_submodule(config.capture.module)
        if config.capture.output:
            module.register_forward_hook(
                lambda _module, _inputs, output: self._captured.append(
                    output[0] if isinstance(output, tuple) else output
                )
            )
        else:
            module.register_forward_pre_hook(
                lambda _module, inputs: self._captured.append(inputs[0])
            )


class NxdiDecoderLayer(nn.Module):
    """Attention, then experts, each on normed inputs and with a residual."""

    def __init__(self, config: DecoderInferenceConfig):
        super().__init__()
        c = config.decoder
        assert c.moe is not None
        norm = get_rmsnorm_cls()
        self.input_layernorm = norm(c.hidden_size, eps=c.norm_eps)
        self.self_attn = DecoderAttention(config)
        self.post_attention_layernorm = norm(c.hidden_size, eps=c.norm_eps)
        self.mlp = initialize_moe_module(config)
        if c.moe.shared_expert_width:
            self.mlp.shared_experts = GatedSharedExpert(c, config.neuron_config.torch_dtype)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **attention: object
    ) -> tuple[Tensor, object, object, object, None]:
        """Run the layer. hidden_states: [B, S, hidden].

        Returns the new ones, new keys and values, cos and sin for the next layer, and None.
        """
        mixed, new_key_values, cos, sin = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), **attention
        )
        x = hidden_states + mixed
        x = x + self.mlp(self.post_attention_layernorm(x), padding_mask)[0]
        return x, new_key_values, cos, sin, None


class DecoderAttention(NeuronAttentionBase):
    """Grouped-query attention with q/k norm per head and rotary positions over three axes."""

    def __init__(self, config: DecoderInferenceConfig):
        c = config.decoder
        norm = get_rmsnorm_cls()
        super().__init__(
            config=config,
            hidden_size=c.hidden_size,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            rotary_emb=AxisRotary(c.rope, c.head_dim),
            rms_norm_eps=c.norm_eps,
            q_layernorm=norm(c.head_dim, c.norm_eps),
            k_layernorm=norm(c.head_dim, c.norm_eps),
        )


class AxisRotary(nn.Module):
    """cos and sin of positions over time, height and width, see model.rotary.Rotary.

    NxDI casts parameters and buffers to bfloat16, which costs frequencies several radians at
    position 1000.
    """

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        ours = Rotary(rope, head_dim)
        self._constants = ours.frequencies, ours.axis

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, S, head_dim] in x's dtype. positions: float32 [3, B, S]."""
        frequencies, axis = (constant.to(positions.device) for constant in self._constants)
        of_axis = positions.float().index_select(0, axis)  # [head_dim, B, S]
        angles = of_axis.permute(1, 2, 0) * frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class GatedSharedExpert(SharedExperts):
    """The talker's shared expert, times sigmoid(gate(x)).

    NxDI's MoE sums it over the cores with the routed experts, whose width differs.
    """

    def __init__(self, c: DecoderConfig, dtype: torch.dtype):
        assert c.moe is not None
        super().__init__(
            hidden_size=c.hidden_size,
            intermediate_size=c.moe.shared_expert_width,
            num_shared_experts=1,
            hidden_act="silu",
            dtype=dtype,
            reduce_dtype=dtype,
        )
        self.gate = nn.Linear(c.hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        """Map x [rows, hidden] -> [rows, hidden]."""
        return torch.sigmoid(self.gate(x)) * super().forward(x, seq_len)


class SlotKvCache(KVCacheManager):
    """The KV cache, [slots, kv_heads, positions, head_dim], with decode graphs of some slots.

    An idle row reads slot 0, and writes to an extra position at a slot's end. NxDI's own cache
    would write zeros to other slots at the bucket's last position.
    """

    @property
    def _is_partial(self) -> bool:
        decodes = not self.neuron_config.is_prefill_stage
        return decodes and self.batch_size < self.kv_cache_batch_size

    def get_kv_by_layer_id(
        self, idx: int, seq_len: int, seq_ids: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return a graph's keys and values; see KVCacheManager."""
        keys, values = super().get_kv_by_layer_id(
            idx=idx, seq_len=seq_len, seq_ids=seq_ids, **kwargs
        )
        if not self._is_partial:
            return keys, values
        assert seq_ids is not None
        slots = _readable_slots(seq_ids)
        return keys.index_select(0, slots), values.index_select(0, slots)

    def update_kv_by_layer_id(
        self,
        idx: int,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        kv_per_layer: tuple[Tensor, Tensor],
        seq_len: int,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's cache with new [B, kv_heads, 1, head_dim] keys and values."""
        if not self._is_partial:
            return super().update_kv_by_layer_id(
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                seq_ids=seq_ids,
                position_ids=position_ids,
                kv_per_layer=kv_per_layer,
                seq_len=seq_len,
                **kwargs,
            )
        keys, values = self._fetch_cache(idx)
        new_keys, new_values = kv_per_layer
        heads = torch.arange(keys.shape[1], device=keys.device).view(1, -1, 1)
        unread = torch.full_like(position_ids, self.neuron_config.max_length)
        positions = torch.where(seq_ids.view(-1, 1) == IDLE, unread, position_ids)
        at = (_readable_slots(seq_ids).view(-1, 1, 1), heads, positions.view(-1, 1, 1))
        indices = torch.broadcast_tensors(*(index.long() for index in at))
        return (
            torch.index_put(keys, indices, new_keys),
            torch.index_put(values, indices, new_values),
        )


def _readable_slots(seq_ids: Tensor) -> Tensor:
    return seq_ids.clamp(min=0)
