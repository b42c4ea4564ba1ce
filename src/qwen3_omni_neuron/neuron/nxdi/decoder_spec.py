"""Description of the thinker's or the talker's decoder, and the profiles of its experts.

Decode reads only the chosen experts, in both profiles. In prefill, "safe" is NxD's blockwise matmul
in torch operations. "fast" is its kernel that cuts each expert's width over the two halves of a
core at LNC=2 (use_shard_on_intermediate_dynamic_while). It takes the rows of an expert in blocks of
128, the last one padded, so smaller blocks pad less. A core's share of an expert's width has to be
a multiple of 256: it is padded with zeros, which are read, too:

    released thinker, 128 experts of width 768 in 48 layers    TP 4: 54 -> 72 GiB   TP 8: -> 144 GiB
    released talker, 128 experts of width 384 in 20 layers     TP 4: 5.6 -> 15 GiB  TP 8: -> 30 GiB

Nothing here was measured on a device.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.part import rank_file

EXECUTABLE_FILE = "model.pt"
CONFIG_FILE = "neuron_config.json"
DECODERS = ("thinker", "talker")
"""The parts that are NxDI's models; the others are traced from the modules of model/."""


@dataclass(frozen=True)
class DecoderSpec:
    """Description of one decoder to be compiled or loaded. part: one of DECODERS.

    Its graphs share one set of weights and one KV cache: a prefill of one prompt for each of the
    plan's `prompt_buckets`, and a decode step for each pair of `batches` and `decode_buckets`.
    plan: its context_length is the decoder's own, with which decode_buckets end.
    """

    part: str
    config: OmniConfig
    plan: CompilePlan

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's own config."""
        return decoder_config(self.config, self.part)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and of weights, but for the experts if they are int8."""
        dtype: torch.dtype = getattr(torch, self.plan.arithmetic)
        return dtype

    @property
    def int8(self) -> bool:
        """True if the routed experts are int8 with a float32 scale for each output."""
        return self.plan.dtype == "int8" and self.part == "thinker"

    @property
    def takes_rows(self) -> bool:
        """True for the talker, whose inputs are rows; the thinker's are tokens and media."""
        return self.part == "talker"

    @property
    def deepstack_layers(self) -> int:
        """Number of first layers whose output gets image rows added; 0 for the talker."""
        return 0 if self.takes_rows else len(self.config.thinker.vision.deepstack_layers)


def decoder_spec(config: OmniConfig, plan: CompilePlan, part: str) -> DecoderSpec:
    """Return the spec of one of DECODERS, with a compile plan's sizes for it.

    Raises OptionError for prompts that are longer than the decoder's KV cache.
    """
    context = plan.context_length if part == "thinker" else plan.talker_context_length
    if plan.prompt_buckets[-1] > context:
        raise OptionError(
            f"prompt_buckets has {plan.prompt_buckets[-1]}, and the {part}'s KV cache {context} "
            "positions. Leave talker_context_length out, or raise it."
        )
    windows = buckets_within(context, plan.decode_buckets)
    return DecoderSpec(part, config, replace(plan, context_length=context, decode_buckets=windows))


KERNEL_LNC = 2
KERNEL_BLOCK_ROWS = 128
_KERNEL_HIDDEN = (512, 8192)  # least and greatest hidden size; it is a multiple of the least


def check_experts(c: DecoderConfig, plan: CompilePlan) -> None:
    """Check that the plan's profile can compute these experts. Raises OptionError if not."""
    assert c.moe is not None
    widths = {"the shared expert": c.moe.shared_expert_width}
    if plan.profile == "safe":
        widths["a routed expert"] = c.moe.expert_width
    for owner, width in widths.items():
        if width % plan.tp:
            raise OptionError(
                f"the width of {owner}, {width}, can't be cut over {plan.tp} cores. Choose another "
                "TP degree."
            )
    if plan.profile != "fast":
        return
    if plan.dtype == "int8":
        raise OptionError(
            'profile "fast" takes kernels that have no int8. Choose profile "safe", or bfloat16.'
        )
    if plan.lnc != KERNEL_LNC:
        raise OptionError(
            f'profile "fast" takes kernels for LNC={KERNEL_LNC}, and the plan has LNC={plan.lnc}. '
            f"Compile with --lnc {KERNEL_LNC}, or with --profile safe."
        )
    least, most = _KERNEL_HIDDEN
    if c.hidden_size % least or not least <= c.hidden_size <= most:
        raise OptionError(
            f'profile "fast" takes kernels for hidden sizes that are multiples of {least} up to '
            f'{most}, and this decoder has {c.hidden_size}. Choose profile "safe".'
        )


def blockwise_options(plan: CompilePlan) -> dict[str, Any]:
    """Return the options of NxD's BlockwiseMatmulConfig."""
    if plan.profile == "safe":
        return {"use_torch_block_wise": True, "logical_nc_config": plan.lnc}
    return {
        "use_shard_on_intermediate_dynamic_while": True,
        "block_size": KERNEL_BLOCK_ROWS,
        "logical_nc_config": plan.lnc,
    }


def decoder_files(tp: int) -> tuple[str, ...]:
    """List the files of a compiled decoder, relative to its folder.

    model.pt             every graph of every bucket: NxDI's TorchScript with the NEFFs inside
    neuron_config.json   NxDI's config, for a human reader; loading reads the plan instead
    weights/tp{rank}_sharded_checkpoint.safetensors
                         each core's weights: see neuron.nxdi.decoder_weights
    """
    return (EXECUTABLE_FILE, CONFIG_FILE, *(rank_file(rank) for rank in range(tp)))
