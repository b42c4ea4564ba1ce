"""A Neuron device made of torch on the CPU: loaded parts and decoders that run our own modules.

As a device does, it refuses inputs of another shape or type than was compiled, and calls after its
memory was released.
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
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.target import EngineSpec, Target
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.nxdi.build import build_engines
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import IDLE, DecoderSpec, Inputs, Outputs
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import DecoderGraphs, NxdToolchain
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec
from testing.graph_cases import with_weights
from testing.models import load_models
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


class EagerPart(LoadedPart):
    """A loaded part whose graphs run the modules of `owner`, on one core.

    called: labels of calls so far. broken: label of a graph that raises. state: the core's state.
    """

    def __init__(self, owner: nn.Module, graphs: Iterable[Graph]):
        super().__init__(graphs, self._run_eagerly)
        self.called: list[str] = []
        self.broken = ""
        self._owner = owner
        whole = max((graph.state for graph in self.graphs.values()), key=len)
        self.state = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in whole)

    @property
    def closed(self) -> bool:
        return self._run is None

    @torch.inference_mode()
    def _run_eagerly(self, label: str, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        graph = self.graphs[label]
        if label == self.broken:
            raise RuntimeError(f"{label} failed on the device")
        for name, tensor in inputs.items():
            if not tensor.is_contiguous():
                raise RuntimeError(f"{name} of {label} is not contiguous")
        self.called.append(label)
        given = [inputs[spec.name].to(spec.dtype) for spec in graph.inputs]
        taken = len(graph.state)
        outputs = graph.module(self._owner)(*given, *self.state[:taken])
        for tensor, spec in zip(outputs, (*graph.outputs, *graph.state), strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), spec
        self.state = (*outputs[len(graph.outputs) :], *self.state[taken:])
        return outputs[: len(graph.outputs)]


class EagerDecoder:
    """The graphs of one decoder over our own module; see neuron.nxdi.nxd_toolchain."""

    def __init__(self, spec: DecoderSpec, model: ThinkerModel | TalkerModel, kv: KvCache):
        self.spec, self.plan, self._model, self._kv = spec, spec.plan, model, kv
        self.called: list[tuple[str, int]] = []
        self.closed = False

    @torch.inference_mode()
    def prefill(self, inputs: Inputs) -> Outputs:
        ids, mask, indices, (slot,) = inputs[:4]
        bucket = ids.shape[1]
        assert ids.shape == mask.shape == indices.shape == (1, bucket)
        assert bucket in self.plan.prompt_buckets
        self.called.append(("prefill", bucket))
        last = mask.sum().long().view(1) - 1
        cache = PromptCache(self._kv.slots(int(slot), int(slot) + 1))
        positions = inputs[21].view(3, bucket)
        if isinstance(self._model, TalkerModel):
            logits, hidden = self._model.prefill(
                inputs[18].view(bucket, -1), positions, last, cache
            )
            return logits, hidden[None]
        media, filled, deepstack = inputs[22:25]
        rows = torch.where(filled[0] != 0, media[0], self._model.embedding(ids[0].long()))
        logits, accepted = self._model.prefill(rows, positions, last, cache, deepstack[:, 0])
        return logits, accepted[None]

    @torch.inference_mode()
    def decode(self, inputs: Inputs) -> Outputs:
        ids, mask, indices, slots = inputs[:4]
        bucket, batch = mask.shape[1], len(slots)
        assert bucket in self.plan.decode_buckets
        assert batch in self.plan.batches
        assert ids.shape == indices.shape == (batch, 1)
        if batch == self.plan.max_concurrency:
            rows = enumerate(slots.tolist())
            assert all(slot in (row, IDLE) for row, slot in rows), "row i is slot i"
        self.called.append((f"decode {batch}", bucket))
        busy = (slots != IDLE).nonzero().flatten()
        lengths = indices[busy, 0].long()
        assert mask[busy].sum(1).tolist() == lengths.tolist(), "a slot's positions are all read"
        cache = SlotCache(self._kv.window(int(lengths.max()) + 1), slots[busy].long(), lengths)
        positions = inputs[21][0, busy, 0]
        if isinstance(self._model, TalkerModel):
            given, hidden = self._model.decode(inputs[18][busy, 0], positions, cache)
        else:
            given = self._model.decode(ids[busy, 0].long(), positions, cache)
            hidden = torch.zeros(len(busy), 1)
        # The outputs of an idle row are NaN, as nobody may read them.
        logits = torch.full((batch, given.shape[1]), float("nan"), dtype=given.dtype)
        states = torch.full((batch, 1, hidden.shape[1]), float("nan"), dtype=hidden.dtype)
        logits[busy], states[busy, 0] = given, hidden
        return logits, states

    def close(self) -> None:
        self.closed = True


class EagerToolchain(NxdToolchain):
    """A toolchain that loads without having compiled.

    spec: its checkpoint gives the weights. parts, decoders: those that were loaded, by name.
    broken: the label of a graph that raises, by part.
    """

    def __init__(self, spec: EngineSpec, broken: Mapping[str, str] | None = None):
        # The graphs of one core that holds the other cores' shares, too.
        self._spec, self._plan = spec, replace(spec.plan, tp=Degrees.same(1))
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

    def load_decoder(self, spec: DecoderSpec, folder: Path) -> DecoderGraphs:
        _report_cores()
        self.decoders[spec.part] = eager_decoder(spec, self._plan.model)
        return self.decoders[spec.part]


def _report_cores() -> None:
    """Write this process's cores into the folder that REPORT names, if any."""
    if folder := os.environ.get(REPORT):
        names = ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG")
        cores = " ".join(os.environ.get(name, "none") for name in names)
        (Path(folder) / str(os.getpid())).write_text(cores, encoding="utf-8")


def eager_target(toolchain: EagerToolchain) -> Target:
    """Return target neuron over a toolchain. It can be sent to another process."""
    return replace(NEURON, build_engines=partial(build_engines, toolchain=toolchain))


def eager_decoder(spec: DecoderSpec, model: Path) -> EagerDecoder:
    """Make a decoder's graphs over the weights of the checkpoint `model`, on one core."""
    plan = spec.plan
    weights, _ = eager_models(model, spec.dtype)
    kv = KvCache.zeros(spec.decoder, plan.max_concurrency, plan.context_length, spec.dtype)
    return EagerDecoder(spec, getattr(weights, spec.part), kv)


@lru_cache(maxsize=2)
def eager_models(folder: Path, dtype: torch.dtype) -> tuple[Models, Models]:
    """Return the CPU's modules, and those that graphs are traced from, with the same weights."""
    config = read_config(folder)
    weights = load_models(Checkpoint(folder), config, dtype)
    return weights, with_weights(static_models(config, dtype), weights)


def eager_spec(folder: Path, **settings: object) -> EngineSpec:
    """Make a spec of a tree. settings: settings of its plan that replace SETTINGS."""
    return replace(engine_spec(folder, "neuron", **(SETTINGS | settings)), compiled=folder)
