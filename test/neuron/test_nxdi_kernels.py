"""The kernels that a plan asks NxDI for: attention's alone, which takes what it is given."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qwen3_omni_neuron.neuron.graphs.cut import key_heads, query_heads
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DECODERS, DecoderSpec, decoder_spec
from testing.neuron.kernel_checks import AttentionChecks
from testing.released import RELEASED
from testing.specs import plan_of

DTYPES = ("bfloat16", "float32", "int8")
PLANS = [(tp, lnc, dtype) for tp in (8, 4, 2, 1) for lnc in (2, 1) for dtype in DTYPES]
# Rows of the prompts that NxDI gives its kernel, by lnc.
TAKEN = {2: [256, 512, 1024, 1536, 2048, 4096, 8192], 1: [4096, 8192]}


def specs(part: str) -> Iterator[DecoderSpec]:
    """The decoder of the released model in every plan that differs in what a kernel sees."""
    for tp, lnc, dtype in PLANS:
        plan = plan_of(Path(), RELEASED, "neuron", tp=tp, lnc=lnc, dtype=dtype)
        yield decoder_spec(RELEASED, plan, part)


@pytest.mark.parametrize("part", DECODERS)
def test_no_plan_asks_for_a_kernel_of_experts(nxdi, part) -> None:
    from neuronx_distributed.modules.moe.blockwise import can_use_blockwise_matmul_nki
    from neuronx_distributed.modules.moe.model_utils import GLUType

    from qwen3_omni_neuron.neuron.nxdi.inference_config import inference_config

    for spec in specs(part):
        config = inference_config(spec)
        options = vars(config.neuron_config)
        kernels = [name for name, value in options.items() if "kernel_enabled" in name and value]
        assert kernels == []
        blockwise = config.neuron_config.blockwise_matmul_config
        given = {name: getattr(blockwise, name) for name in ("block_size", "logical_nc_config")}
        with pytest.warns(UserWarning, match="use_torch_block_wise set"):
            assert not can_use_blockwise_matmul_nki(
                hidden_size=config.hidden_size,
                intermediate_size_tp=config.intermediate_size // spec.tp,
                glu_mlp=True,
                glu_type=GLUType.GLU,
                use_torch_block_wise=blockwise.use_torch_block_wise,
                device=torch.device("xla"),
                **given,
            )


@pytest.mark.parametrize("part", DECODERS)
def test_the_attention_kernel_takes_every_prompt_that_nxdi_gives_it(
    nxdi, part, monkeypatch
) -> None:
    """NxDI's own choice and call, and the checks at the kernel's entry, for each rank's heads."""
    from neuronx_distributed_inference.modules.attention import attention_base

    try:
        kernel = AttentionChecks()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(attention_base, "_flash_fwd_call_nki", kernel)
    monkeypatch.setattr(attention_base, "_has_native_gqa_tp_support", True)
    for spec in specs(part):
        kernel.sizes.clear()
        for rows in spec.plan.prompt_buckets:
            prefill(spec, rows)
        lnc = spec.plan.lnc
        assert kernel.sizes == [(lnc, rows) for rows in TAKEN[lnc]]


def prefill(spec: DecoderSpec, rows: int) -> None:
    """Compute a prompt's attention on the meta device, with a rank's heads, as NxDI's class does.

    The class itself would need the processes of all ranks.
    """
    from neuronx_distributed_inference.modules.attention.attention_base import (
        FlashAttentionStrategy,
        NeuronAttentionBase,
    )

    from qwen3_omni_neuron.neuron.nxdi.inference_config import inference_config

    c, config, tp = spec.decoder, inference_config(spec).neuron_config, spec.tp
    heads, keys = (len(of(c.heads, c.kv_heads, tp)[0]) for of in (query_heads, key_heads))
    options = ("attn_kernel_enabled", "cp_degree", "logical_nc_config", "padding_side")
    layer = SimpleNamespace(
        num_heads=heads,
        num_key_value_heads=keys,
        head_dim=c.head_dim,
        softmax_scale=c.head_dim**0.5,
        torch_dtype=config.torch_dtype,
        learned_sinks_size=None,
        sliding_window=None,
        **{name: getattr(config, name) for name in options},
    )
    choose = partial(NeuronAttentionBase.get_flash_attention_strategy, layer)
    layer.get_flash_attention_strategy = choose
    if choose(rows, True) == FlashAttentionStrategy.NONE:
        return
    dtype = config.torch_dtype
    q, k, v = (
        torch.empty(1, n, rows, c.head_dim, dtype=dtype, device="meta") for n in (heads, keys, keys)
    )
    mask = torch.empty(1, 1, rows, rows, dtype=torch.bool, device="meta")
    output, _ = NeuronAttentionBase.perform_prefill(layer, q, k, v, rows, 1, mask)
    assert output.shape == (1, heads, c.head_dim, rows)
