"""The two profiles of the routed experts on NxDI, and their memory.

Decode reads only the chosen experts, in both profiles. In prefill, "safe" is NxD's blockwise matmul
in torch operations. "fast" is its kernel that cuts each expert's width over the two halves of a
core at LNC=2 (use_shard_on_intermediate_dynamic_while). It takes the rows of an expert in blocks of
128, the last one padded, so smaller blocks pad less. A core's share of an expert's width has to be
a multiple of 256: it is padded with zeros, which are read, too:

    released thinker, 128 experts of width 768 in 48 layers    TP 4: 54 -> 72 GiB   TP 8: -> 144 GiB
    released talker, 128 experts of width 384 in 20 layers     TP 4: 5.6 -> 15 GiB  TP 8: -> 30 GiB

Nothing here was measured on a device.
"""

from typing import Any

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderPlan

KERNEL_LNC = 2
KERNEL_BLOCK_ROWS = 128
_KERNEL_HIDDEN = (512, 8192)  # least and greatest hidden size, which is a multiple of the least


def check_experts(c: DecoderConfig, plan: DecoderPlan) -> None:
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
    if plan.lnc != KERNEL_LNC:
        raise OptionError(
            f'profile "fast" takes kernels for LNC={KERNEL_LNC}, and the plan has LNC={plan.lnc}. '
            f'Set NEURON_LOGICAL_NC_CONFIG={KERNEL_LNC}, or choose profile "safe".'
        )
    least, most = _KERNEL_HIDDEN
    if c.hidden_size % least or not least <= c.hidden_size <= most:
        raise OptionError(
            f'profile "fast" takes kernels for hidden sizes that are multiples of {least} up to '
            f'{most}, and this decoder has {c.hidden_size}. Choose profile "safe".'
        )


def blockwise_options(plan: DecoderPlan) -> dict[str, Any]:
    """Return the options of NxD's BlockwiseMatmulConfig."""
    if plan.profile == "safe":
        return {"use_torch_block_wise": True, "logical_nc_config": plan.lnc}
    return {
        "use_shard_on_intermediate_dynamic_while": True,
        "block_size": KERNEL_BLOCK_ROWS,
        "logical_nc_config": plan.lnc,
    }
