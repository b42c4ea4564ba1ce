"""Every graph called once after it was loaded, so that no request meets a graph's first call."""

import logging
import time
from itertools import product

import torch

from qwen3_omni_neuron.neuron.inputs import IDLE, Inputs, Media, decode_inputs, prefill_inputs
from qwen3_omni_neuron.neuron.part import LoadedPart
from qwen3_omni_neuron.neuron.slots import DecoderGraphs

logger = logging.getLogger(__name__)


def warm_up(name: str, part: LoadedPart) -> None:
    """Call every graph of a part, with inputs that leave every slot of its state as it is.

    name: of the part, for the log. Raises what a graph raises.
    """
    started = time.monotonic()
    for label, graph in part.graphs.items():
        part.call(label, *[spec.quiet() for spec in graph.inputs])
    _log(name, len(part.graphs), started)


def warm_up_decoder(
    name: str, graphs: DecoderGraphs, width: int, deepstack_layers: int | None
) -> None:
    """As `warm_up`, for the graphs of a decoder. What they leave in slot 0 a prefill overwrites.

    width: of its rows. deepstack_layers: of the thinker; None for the talker, which takes rows.
    """
    started, plan = time.monotonic(), graphs.plan
    for bucket in plan.prompt_buckets:
        graphs.prefill(_prompt(bucket, width, plan.dtype, deepstack_layers))
    for bucket, batch in product(plan.decode_buckets, plan.batches):
        rows = torch.zeros(batch, width, dtype=plan.dtype) if deepstack_layers is None else None
        lines, zeros = [0, *[IDLE] * (batch - 1)], [0] * batch
        graphs.decode(decode_inputs(lines, bucket, zeros, [0.0] * batch, rows=rows))
    _log(name, len(plan.prompt_buckets) + len(plan.batches) * len(plan.decode_buckets), started)


def _prompt(bucket: int, width: int, dtype: torch.dtype, deepstack_layers: int | None) -> Inputs:
    """One row, padded."""
    positions, rows = torch.zeros(3, 1), torch.zeros(1, width, dtype=dtype)
    if deepstack_layers is None:
        return prefill_inputs(0, bucket, positions, rows=rows)
    unseen = torch.zeros(deepstack_layers, 1, width, dtype=dtype)
    media = Media(rows, torch.zeros(1, dtype=torch.bool), unseen)
    return prefill_inputs(0, bucket, positions, torch.zeros(1, dtype=torch.int64), media=media)


def _log(name: str, graphs: int, started: float) -> None:
    seconds = time.monotonic() - started
    logger.info("%s: called each of %d graphs once, in %.1f s", name, graphs, seconds)
