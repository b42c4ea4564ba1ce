"""A simulated Neuron machine: loaded parts and decoders that run our own modules on the CPU.

As on a device, an input of a shape or type that was not compiled is an error, and so is a call
after the memory was freed.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, load_models
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.target import EngineSpec, Target
from qwen3_omni_neuron.graphs.all import all_graphs, static_models, with_weights
from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.graphs.graph import Graph
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.neuron.build import build_engines
from qwen3_omni_neuron.neuron.nxdi.inputs import IDLE, Inputs
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan, decoder_plan
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs, Outputs
from qwen3_omni_neuron.neuron.nxdi.spec import DecoderSpec
from qwen3_omni_neuron.neuron.part.spec import PartSpec
from qwen3_omni_neuron.neuron.target import NEURON
from testing.specs import engine_spec

SLOTS = 3
CONTEXT_LENGTH = 256
PROMPT_BUCKETS = (48, 96)
DECODE_BUCKETS = (64, 128)
# Two batches of each kind, so that rows are padded and calls are cut.
SETTINGS = {
    "tp": 8,
    "max_concurrency": SLOTS,
    "context_length": CONTEXT_LENGTH,
    "prompt_buckets": PROMPT_BUCKETS,
    "decode_buckets": DECODE_BUCKETS,
    "patch_buckets": (16, 64, 256),
    "audio_windows": (1, 4),
    "projection_rows": (8, 32),
    "batches": (1,),
    "chunk_frames": (1, 2, 4, 8),
}
REPORT = "EAGER_NEURON_REPORT"  # names a folder that takes the cores of each process


class EagerPart:
    """A LoadedPart over a plain module. called: the labels so far. broken: a label that raises."""

    def __init__(self, owner: nn.Module, graphs: Iterable[Graph]):
        self.graphs: Mapping[str, Graph] = {graph.label: graph for graph in graphs}
        self.called: list[str] = []
        self.broken = ""
        self.closed = False
        self._owner = owner
        specs = {graph.state for graph in self.graphs.values() if graph.state}
        assert len(specs) <= 1, "the graphs of a part share one state"
        self.state = tuple(
            torch.zeros(spec.lengths, dtype=spec.dtype) for state in specs for spec in state
        )

    @torch.inference_mode()
    def call(self, label: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        graph = self.graphs[label]
        if self.closed:
            raise RuntimeError(f"{label} was called after its part was closed")
        if label == self.broken:
            raise RuntimeError(f"{label} failed on the device")
        for given, spec in zip(inputs, graph.inputs, strict=True):
            if (tuple(given.shape), given.dtype) != (spec.shape, spec.dtype):
                raise RuntimeError(f"{label} takes {spec}, got {given.dtype} {list(given.shape)}")
            if not given.is_contiguous():
                raise RuntimeError(f"{spec.name} of {label} is not contiguous")
        self.called.append(label)
        outputs = graph.module(self._owner)(*inputs, *self.state)
        for given, spec in zip(outputs, (*graph.outputs, *graph.state), strict=True):
            assert (tuple(given.shape), given.dtype) == (spec.shape, spec.dtype), spec
        self.state = outputs[len(graph.outputs) :]
        return outputs[: len(graph.outputs)]

    def close(self) -> None:
        self.closed = True


class EagerDecoder:
    """DecoderGraphs over a plain module, with the inputs of NxDI's graphs."""

    def __init__(self, plan: DecoderPlan, model: Thinker | Talker, kv: KvCache):
        self.plan, self._model, self._kv = plan, model, kv
        self.called: list[tuple[str, int]] = []
        self.closed = False

    @torch.inference_mode()
    def prefill(self, inputs: Inputs) -> Outputs:
        ids, mask, places, (slot,) = inputs[:4]
        bucket = ids.shape[1]
        assert ids.shape == mask.shape == places.shape == (1, bucket)
        assert bucket in self.plan.prompt_buckets
        self.called.append(("prefill", bucket))
        last = mask.sum().long().view(1) - 1
        cache = PromptCache(self._kv.slots(int(slot), int(slot) + 1))
        positions = inputs[21].view(3, bucket)
        if isinstance(self._model, Talker):
            logits, hidden = self._model.prefill(
                inputs[18].view(bucket, -1), positions, last, cache
            )
            return logits, hidden[None]
        media, filled, deepstack = inputs[22:25]
        rows = torch.where(filled[0] != 0, media[0], self._model.embedding(ids[0].long()))
        everywhere = torch.arange(bucket)  # rows without media have zeros to add
        logits, accepted = self._model.prefill(
            rows, positions, last, cache, everywhere, deepstack[:, 0]
        )
        return logits, accepted[None]

    @torch.inference_mode()
    def decode(self, inputs: Inputs) -> Outputs:
        ids, mask, places, lines = inputs[:4]
        bucket, batch = mask.shape[1], len(lines)
        assert bucket in self.plan.decode_buckets
        assert batch in self.plan.batches
        assert ids.shape == places.shape == (batch, 1)
        if batch == self.plan.slots:
            rows = enumerate(lines.tolist())
            assert all(line in (row, IDLE) for row, line in rows), "row i is line i"
        self.called.append((f"decode {batch}", bucket))
        busy = (lines != IDLE).nonzero().flatten()
        lengths = places[busy, 0].long()
        assert mask[busy].sum(1).tolist() == lengths.tolist(), "the mask has all earlier rows"
        cache = SlotCache(self._kv.window(int(lengths.max()) + 1), lines[busy].long(), lengths)
        positions = inputs[21][0, busy, 0]
        if isinstance(self._model, Talker):
            given, hidden = self._model.decode(inputs[18][busy, 0], positions, cache)
        else:
            given = self._model.decode(ids[busy, 0].long(), positions, cache)
            hidden = torch.zeros(len(busy), 1)
        # The engines must not read the outputs of an idle row.
        logits = torch.full((len(lines), given.shape[1]), float("nan"), dtype=given.dtype)
        states = torch.full((len(lines), 1, hidden.shape[1]), float("nan"), dtype=hidden.dtype)
        logits[busy], states[busy, 0] = given, hidden
        return logits, states

    def close(self) -> None:
        self.closed = True


class EagerToolchain:
    """A `neuron.toolchain.Toolchain` that loads without having compiled.

    spec: its checkpoint gives the weights. parts, decoders: those that were loaded, by name.
    broken: the label of a graph that raises, by part.
    """

    def __init__(self, spec: EngineSpec, broken: Mapping[str, str] | None = None):
        # The graphs of one core, which has the others' share, too.
        self._spec, self._plan = spec, replace(spec.plan, tp=1)
        self._broken = broken or {}
        self.parts: dict[str, EagerPart] = {}
        self.decoders: dict[str, EagerDecoder] = {}

    def load_part(self, spec: PartSpec, folder: Path) -> EagerPart:
        _report_cores()
        _, static = eager_models(self._plan.model, self._spec.dtype)
        graphs = [g for g in all_graphs(self._spec.config, self._plan) if g.part == spec.name]
        part = EagerPart(getattr(static, spec.name), graphs)
        part.broken = self._broken.get(spec.name, "")
        self.parts[spec.name] = part
        return part

    def load_decoder(
        self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path
    ) -> DecoderGraphs:
        _report_cores()
        self.decoders[spec.part] = eager_decoder(spec.part, self._spec.config, self._plan)
        return self.decoders[spec.part]

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        raise NotImplementedError("this toolchain only loads")

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        raise NotImplementedError("this toolchain only loads")


def _report_cores() -> None:
    """Write this process's cores into the folder that REPORT names, if any."""
    if folder := os.environ.get(REPORT):
        names = ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG")
        cores = " ".join(os.environ.get(name, "none") for name in names)
        (Path(folder) / str(os.getpid())).write_text(cores, encoding="utf-8")


def eager_target(toolchain: EagerToolchain) -> Target:
    """The target neuron over a toolchain. It can be sent to another process."""
    return replace(NEURON, build_engines=partial(build_engines, toolchain=toolchain))


def eager_decoder(part: str, config: OmniConfig, plan: CompilePlan) -> EagerDecoder:
    of_decoder = decoder_plan(replace(plan, tp=1), part, on_cpu=True)
    weights, _ = eager_models(plan.model, of_decoder.dtype)
    c = decoder_config(config, part)
    kv = KvCache.zeros(c, of_decoder.slots, of_decoder.context_length, of_decoder.dtype)
    return EagerDecoder(of_decoder, getattr(weights, part), kv)


@lru_cache(maxsize=2)
def eager_models(folder: Path, dtype: torch.dtype) -> tuple[Models, Models]:
    """Load the CPU's models, and the models that graphs are traced from, over the same weights."""
    config = read_config(folder)
    weights = load_models(Checkpoint(folder), config, dtype)
    return weights, with_weights(static_models(config, dtype), weights)


def eager_spec(folder: Path, **settings: object) -> EngineSpec:
    """Make a spec of a tree. settings: of its plan, in the place of SETTINGS."""
    spec = engine_spec(folder, "neuron", **(SETTINGS | settings))
    return replace(spec, compiled=folder)
