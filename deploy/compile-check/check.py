"""Compile one graph of each kind with neuronx-cc, without a device: two layers, released widths.

    PYTHONPATH=src:. python deploy/compile-check/check.py

It needs TorchNeuron and neuronx-cc, and no weights. Nobody has run it with them yet: the tests run
it over a stand-in. It prints a row for each graph, and exits with 1 if one was not compiled.
"""

import importlib.util
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import PARTS
from qwen3_omni_neuron.neuron.part import PartSpec, part_spec, to_device_type
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from qwen3_omni_neuron.neuron.torchneuron.environment import (
    CACHES,
    COMPILE_ONLY,
    LOCAL_FOLDER,
    NEFF_FOLDER,
    set_before_import,
    settings,
)
from qwen3_omni_neuron.neuron.torchneuron.runtime import TorchNeuron
from testing.released import of_depth

# Compiled already, as text_projection and, at the released sizes, thinker_flush.
SAME = ("hidden_projection", "talker_flush")


def main(config: OmniConfig, runtime: TorchNeuron, folder: Path) -> int:
    """Compile, with the caches in `folder`, and print the table. Returns the exit status."""
    plan = make_plan(
        folder, config, TORCHNEURON.limits, dtype="bfloat16", prompt_buckets=(128,),
        patch_buckets=(1024,), audio_windows=(1,), chunk_frames=(1,),
    )  # fmt: skip
    for name in (*CACHES.values(), LOCAL_FOLDER):
        (folder / name).mkdir()
    set_before_import({**settings(folder, plan.opt_level), **COMPILE_ONLY})
    device, failed = runtime.start_compiling(plan.tp.each[-1]), 0
    print("| graph | TP | s | NEFFs | result |\n| --- | ---: | ---: | ---: | --- |")
    for part in PARTS:
        spec, seen = part_spec(config, plan, part), set(SAME)
        for graph in spec.graphs:
            if graph.name not in seen:
                seen.add(graph.name)
                failed += not _row(replace(spec, graphs=(graph,)), device, folder / NEFF_FOLDER)
    simulator = importlib.util.find_spec("nki") is not None
    print(f"\nNKI's simulator: {'' if simulator else 'not '}installed; no kernel here is our own.")
    return int(failed > 0)


def _row(spec: PartSpec, device: torch.device, neffs: Path) -> bool:
    """Compile a spec's only graph, and print its row. Returns whether it was compiled."""
    from qwen3_omni_neuron.neuron.torchneuron.graph import PartGraphs

    (graph,), started = spec.graphs, time.monotonic()
    before, result = len(list(neffs.rglob("*.neff"))), "compiled"
    try:
        inputs = {tensor.name: to_device_type(tensor.idle_input()) for tensor in graph.inputs}
        PartGraphs(spec, device).run(graph.label, inputs)
    except Exception as error:
        result = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    new = len(list(neffs.rglob("*.neff"))) - before
    if result == "compiled" and not new:
        result = "no NEFF"
    seconds = time.monotonic() - started
    print(f"| {graph.label} | {spec.tp} | {seconds:.1f} | {new} | {result} |", flush=True)
    return result == "compiled"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        sys.exit(main(of_depth(2), TorchNeuron(), Path(work)))
