"""Our config in NxDI's terms."""

from dataclasses import dataclass
from typing import Any

import torch
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.graphs.parallel.experts import expert_widths
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.neuron.nxdi.experts import blockwise_options, check_experts
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan


@dataclass(frozen=True)
class Capture:
    """The hidden states that leave every graph beside its logits: what goes into a module, or what
    comes out of it. module: its name in the decoder, "layers.23"."""

    module: str
    output: bool


class DecoderInferenceConfig(InferenceConfig):
    """One of our decoders as NxDI reads it.

    decoder, capture, takes_rows, deepstack_layers: see inference_config.
    """

    decoder: DecoderConfig
    capture: Capture
    takes_rows: bool
    deepstack_layers: int

    @classmethod
    def get_neuron_config_cls(cls) -> type[MoENeuronConfig]:
        return MoENeuronConfig


def inference_config(
    c: DecoderConfig,
    plan: DecoderPlan,
    capture: Capture,
    takes_rows: bool,
    deepstack_layers: int = 0,
) -> DecoderInferenceConfig:
    """takes_rows: the decoder's inputs are rows (the talker), not tokens and media (the thinker).
    deepstack_layers: how many first layers of the thinker add what is seen.

    Raises OptionError where the plan does not fit the decoder (see experts.check_experts), or the
    environment.
    """
    assert c.moe is not None
    check_experts(c, plan)
    return DecoderInferenceConfig(
        _neuron_config(c, plan),
        decoder=c,
        capture=capture,
        takes_rows=takes_rows,
        deepstack_layers=deepstack_layers,
        # What NxDI's own classes read:
        hidden_size=c.hidden_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope.theta,
        intermediate_size=expert_widths(c, plan.tp, plan.profile, plan.dtype).padded,
        num_local_experts=c.moe.experts,
        num_experts_per_tok=c.moe.experts_per_token,
        n_shared_experts=0,  # ours are of a width of their own: see nxdi_decoder
        hidden_act="silu",
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _neuron_config(c: DecoderConfig, plan: DecoderPlan) -> MoENeuronConfig:
    assert c.moe is not None
    options: dict[str, Any] = {
        "tp_degree": plan.tp,
        "moe_tp_degree": plan.tp,  # NxDI's default is 1, whatever tp_degree is
        "torch_dtype": plan.dtype,
        "on_cpu": plan.on_cpu,
        # NxDI takes its attention kernel for buckets of 256 n, in CPU mode too, where it has none.
        "attn_kernel_enabled": False if plan.on_cpu else None,
        "seq_len": plan.context_length,
        "max_context_length": plan.prompt_buckets[-1],
        "enable_bucketing": True,
        "context_encoding_buckets": list(plan.prompt_buckets),
        "token_generation_buckets": list(plan.decode_buckets),
        "batch_size": plan.slots,
        "max_batch_size": plan.slots,
        "ctx_batch_size": 1,
        "tkg_batch_size": plan.slots,
        "kv_cache_batch_size": plan.slots,
        "is_continuous_batching": True,
        # Else an idle row of a decode step writes into the line of a slot that is not.
        "apply_seq_ids_mask": True,
        "padding_side": "right",
        "disable_normalize_top_k_affinities": not c.moe.normalize_weights,
        "blockwise_matmul_config": blockwise_options(plan),
        "logical_nc_config": plan.lnc,
        "save_sharded_checkpoint": True,  # else NxDI cuts the whole checkpoint at every load
        "skip_warmup": True,  # ours tells of a graph that fails: see warm_up
        "disable_numeric_cc_token": True,  # as NxDI's own Qwen3-MoE has it
    }
    config = MoENeuronConfig(**options)
    if config.logical_nc_config != plan.lnc:  # NxDI prefers what the environment says
        raise OptionError(
            f"NEURON_LOGICAL_NC_CONFIG is {config.logical_nc_config}, and the plan has "
            f"LNC={plan.lnc}. They must be the same."
        )
    config.router_config.dtype = torch.float32
    config.router_config.act_fn = "softmax"
    return config
