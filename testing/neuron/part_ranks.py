"""One rank of parts that share their weights over NxD's collectives, for torchrun to start.

    torchrun --nproc-per-node 2 testing/neuron/part_ranks.py CHECKPOINT FOLDER

Every rank writes the weight files into a folder of its own, takes its share, and compares its
graphs' outputs with those of the plain modules. Prints one line a rank when all agree.
"""

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdGroup, TracedPart
from qwen3_omni_neuron.neuron.part import LoadedPart
from qwen3_omni_neuron.neuron.shards import read_part_shard, write_part_shards
from testing.graph_cases import with_weights
from testing.models import load_models
from testing.neuron.nxdi_sources import join_ranks, leave_ranks, make_importable
from testing.part_cases import PlainPart, calls_of, plain_graphs, plain_spec
from testing.simulated_toolchain import States, run_with_state, zero_state

# float64, because the ranks' sums are added in another order.
assert_close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


def run_graph(
    traced: TracedPart, states: States, label: str, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Call one of the rank's graphs over the rank's state."""
    return run_with_state(traced.graphs[label], states, inputs)


@torch.no_grad()
def main(checkpoint: Path, folder: Path) -> None:
    reason = make_importable()
    assert reason is None, reason
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_ranks(ranks)
    group = NxdGroup()
    own = torch.arange(6.0).view(2, 3) + 10 * rank
    every = [torch.arange(6.0).view(2, 3) + 10 * other for other in range(ranks)]
    torch.testing.assert_close(group.gather(own), torch.cat(every, -1), atol=0, rtol=0)
    torch.testing.assert_close(group.sum(own.clone()), sum(every), atol=0, rtol=0)
    config = read_config(checkpoint)
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    models = with_weights(static_models(config, torch.float64), weights)
    for name in ("audio_encoder", "code_predictor", "code2wav"):
        spec, own_folder = plain_spec(config, name, ranks), folder / f"{name}-{rank}"
        own_folder.mkdir()
        write_part_shards(spec, Checkpoint(checkpoint), own_folder)
        traced = TracedPart(spec, group)
        traced.load(read_part_shard(own_folder, rank, traced.weights))
        part = LoadedPart(spec.graphs, partial(run_graph, traced, zero_state(spec)))
        whole = {graph.label: graph for graph in plain_graphs(config, name, 1, torch.float64)}
        plain = PlainPart(whole, getattr(models, name))
        for label, inputs in calls_of(whole):
            given, expected = part.call(label, *inputs), plain.call(label, *inputs)
            assert_close(given, expected)
    # In one write, so that lines of several ranks stay whole.
    sys.stdout.write(f"rank {rank} of {ranks}: alike\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave_ranks()
