"""A decoder's config and plan as NxDI reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec

# NxD quantises only the experts' layers.
QUANTISED_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "quantized": True,
        "quantized_checkpoints_path": "",  # read by NxDI's loading, which is not used
        "quantization_type": "expert_wise_per_channel_symmetric",
        "quantization_dtype": "int8",
        "modules_to_not_convert": ["embed_tokens", "self_attn", "router", "lm_head"],
    }
)


@dataclass(frozen=True)
class Capture:
    """The hidden states that graphs return: a module's output or input."""

    module: str
    output: bool


class DecoderInferenceConfig(InferenceConfig):
    """NxDI's config of a decoder, see `inference_config`. capture: the hidden states to return."""

    decoder: DecoderConfig
    capture: Capture
    takes_rows: bool
    deepstack_layers: int

    @classmethod
    def get_neuron_config_cls(cls) -> type[MoENeuronConfig]:
        """Return the device config's class, for NxDI."""
        return MoENeuronConfig


def inference_config(spec: DecoderSpec, **options: Any) -> DecoderInferenceConfig:
    """Return NxDI's config of a decoder. options: fields of MoENeuronConfig. Raises OptionError."""
    c = spec.decoder
    assert c.moe is not None
    return DecoderInferenceConfig(
        _neuron_config(spec, options),
        decoder=c,
        capture=_capture(spec),
        takes_rows=spec.takes_rows,
        deepstack_layers=spec.deepstack_layers,
        # Read by NxDI's own classes:
        hidden_size=c.hidden_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope.theta,
        intermediate_size=c.moe.expert_width,
        num_local_experts=c.moe.experts,
        num_experts_per_tok=c.moe.experts_per_token,
        n_shared_experts=0,  # ours differ in width: see neuron.nxdi.decoder.GatedSharedExpert
        hidden_act="silu",
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _capture(spec: DecoderSpec) -> Capture:
    talker = spec.config.talker
    if spec.takes_rows:
        return Capture("lm_head", output=False)
    accept_layer = talker.accept_hidden_layer if talker else 0
    # The reference's hidden_states[n] is layer n - 1's output, hidden_states[0] layer 0's input.
    return Capture(f"layers.{max(0, accept_layer - 1)}", output=accept_layer > 0)


def _neuron_config(spec: DecoderSpec, options: dict[str, Any]) -> MoENeuronConfig:
    c, plan = spec.decoder, spec.plan
    assert c.moe is not None
    ours: dict[str, Any] = {
        "tp_degree": spec.tp,
        "moe_tp_degree": spec.tp,  # NxDI's default is always 1
        "torch_dtype": spec.dtype,
        "seq_len": plan.context_length,
        "max_context_length": plan.prompt_buckets[-1],
        "enable_bucketing": True,
        "context_encoding_buckets": list(plan.prompt_buckets),
        "token_generation_buckets": list(plan.decode_buckets),
        "batch_size": plan.max_concurrency,
        "max_batch_size": plan.max_concurrency,
        "ctx_batch_size": 1,
        "tkg_batch_size": plan.max_concurrency,
        "kv_cache_batch_size": plan.max_concurrency,
        "is_continuous_batching": True,
        # Otherwise an idle row of a decode step writes into another slot's KV cache.
        "apply_seq_ids_mask": True,
        "padding_side": "right",
        "disable_normalize_top_k_affinities": not c.moe.normalize_weights,
        # Prompts' experts in torch operations: the kernels require more than our widths, such as
        # blocks of a multiple of 256 rows.
        "blockwise_matmul_config": {"use_torch_block_wise": True, "logical_nc_config": plan.lnc},
        "logical_nc_config": plan.lnc,
        "save_sharded_checkpoint": True,  # else NxDI shards the whole checkpoint at every load
        "skip_warmup": True,  # it hides failing graphs; neuron.nxdi.build.warm_up_decoder doesn't
        "disable_numeric_cc_token": True,  # as NxDI's own Qwen3-MoE
    }
    if spec.int8:
        ours |= QUANTISED_EXPERTS
    config = MoENeuronConfig(**(ours | options))
    if config.logical_nc_config != plan.lnc:  # NxDI prefers the environment
        raise OptionError(
            f"NEURON_LOGICAL_NC_CONFIG is {config.logical_nc_config}, but the plan has "
            f"LNC={plan.lnc}. Unset it, or compile with --lnc {config.logical_nc_config}."
        )
    config.router_config.dtype = torch.float32
    config.router_config.act_fn = "softmax"
    return config
