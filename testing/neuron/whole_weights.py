"""A decoder's whole weights by NxDI's names, for NxDI to cut. Needs no NxDI."""

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.parameters import copy_piece
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import (
    expert_stack_shape,
    nxdi_pieces,
    quantise_columns,
    rank_names,
)

State = dict[str, Tensor]


def whole_weights(spec: DecoderSpec, checkpoint: Checkpoint) -> State:
    """Read every parameter, and make the parameters that hold the cores' numbers."""
    state: State = {}
    with checkpoint.reader() as reader:
        for target, parts in nxdi_pieces(spec.config, spec.part):
            if not parts[0].region:
                state[target] = reader.tensor(parts[0].name).to(spec.dtype)
                continue
            stack = torch.empty(expert_stack_shape(target, spec.decoder), dtype=spec.dtype)
            for part in parts:
                copy_piece(stack, part, reader.tensor(part.name))
            state[target] = stack
            if spec.int8:
                scale = target.removesuffix("weight") + "scale"
                state[target], state[scale] = quantise_columns(stack)
    ranks = torch.arange(spec.tp, dtype=torch.int32)
    return state | {name: ranks.clone() for name in rank_names(spec.decoder.layers)}
