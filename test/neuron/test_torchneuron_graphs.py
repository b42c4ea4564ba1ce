"""Every graph passes the stand-in for TorchNeuron's backend, and gives what the module gives."""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.sampling import NOT_FINITE
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.engines import NeuronPredictor, NeuronVocoder
from qwen3_omni_neuron.neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import LoadedPart, part_spec, to_device_type
from qwen3_omni_neuron.neuron.shards import PartShare, write_part_shards
from qwen3_omni_neuron.neuron.slots import GraphSlots
from qwen3_omni_neuron.neuron.torchneuron import graph as graph_module
from qwen3_omni_neuron.neuron.torchneuron.graph import Collectives, CompiledGraph, PartGraphs
from testing.graph_cases import TINY_PLAN, with_weights
from testing.int8_experts import int8_models
from testing.models import load_models
from testing.repeats import again
from testing.torchneuron.backend import Refused, standing_in
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.outside import DEVICE, OutsideGraphs
from testing.torchneuron.runtime import run_eagerly

CPU = torch.device("cpu")
INT8 = "thinker in int8"
# One graph of each kind; decode of one and of several rows takes experts differently, and 512
# patches attend by a kernel.
LEAN_PLAN = replace(
    TINY_PLAN,
    prompt_buckets=(40,),
    decode_buckets=(64,),
    patch_buckets=(16, 512),
    audio_windows=(2,),
    chunk_frames=(4,),
)
LABELS = {"thinker": 4, "talker": 4, "code2wav": 2, "audio_encoder": 1}
# Replies of test_torchneuron_engines.py call every other graph, as it is captured.
ENCODERS = ("audio_encoder", "vision_encoder")
CASES = [
    (INT8, LEAN_PLAN),
    *((part, LEAN_PLAN) for part in ENCODERS),
    *(again(part, LEAN_PLAN) for part in PARTS if part not in ENCODERS),
    *(again(part, TINY_PLAN) for part in [*PARTS, INT8]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with standing_in():
        yield


@pytest.mark.parametrize(
    ("case", "plan"), CASES, ids={LEAN_PLAN: "of each kind", TINY_PLAN: "at every bucket"}.get
)
def test_every_graph_of_a_part_is_compiled_once_and_gives_what_its_module_gives(
    case: str, plan: CompilePlan, checkpoint: Path, config: OmniConfig, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the state that the graphs of a part share and renew."""
    part = case.partition(" ")[0]
    plan = replace(plan, dtype="int8") if case == INT8 else plan
    spec = part_spec(config, plan, part)
    write_part_shards(spec, Checkpoint(checkpoint), tmp_path)
    compilations = counted(monkeypatch)
    compiled = PartGraphs(spec, CPU, tmp_path)
    weights = load_models(Checkpoint(checkpoint), config, torch.float32)
    models = with_weights(static_models(config, torch.float32), weights)
    if case == INT8:
        models = int8_models(config, weights, torch.float32)
    plain = getattr(models, part)
    state = [torch.zeros(s.shape, dtype=s.dtype) for s in spec.state]
    for turn in range(2):
        for seed, graph in enumerate(spec.graphs):
            given = graph.example(seed)[: len(graph.inputs)]
            with torch.no_grad():
                expected = graph.module(plain)(*given, *state[: len(graph.state)])
            state = [*expected[len(graph.outputs) :], *state[len(graph.state) :]]
            named = {s.name: to_device_type(x) for s, x in zip(graph.inputs, given, strict=True)}
            outputs = compiled.run(graph.label, named)
            for spec_of, ours, theirs in zip(graph.outputs, outputs, expected, strict=False):
                assert ours.dtype == to_device_type(theirs).dtype, spec_of.name
                torch.testing.assert_close(
                    ours.to(theirs.dtype), theirs, atol=2e-5, rtol=0, msg=graph.label
                )
        assert len(compilations) == len(spec.graphs), f"turn {turn}"
    assert len(spec.graphs) >= LABELS.get(part, 1)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets a row for each graph that is compiled."""
    rows, compile_module = list[object](), graph_module.compile_module

    def compiling(*given: Any) -> Any:
        rows.append(given[0])
        return compile_module(*given)

    monkeypatch.setattr(graph_module, "compile_module", compiling)
    return rows


def test_a_call_renews_the_state_that_it_is_given(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled graph serves any tensors of its shapes, and changes no others."""
    plan = replace(LEAN_PLAN, max_concurrency=1)
    spec = part_spec(config, plan, "talker")
    graph = next(graph for graph in spec.graphs if graph.name == "talker_decode")
    share = PartShare(spec, Alone())
    share.allocate()
    with torch.no_grad():
        for number, parameter in enumerate(share.owner.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(number)) / 8)
    compilations = counted(monkeypatch)
    weights = Weights(share.owner, CPU)
    compiled = CompiledGraph(graph, share.owner, weights, CPU)
    states = [tuple(torch.randn(s.shape, generator=seeded(n)) for s in graph.state) for n in (1, 2)]
    before = [tuple(held.clone() for held in state) for state in states]
    for number in (0, 1, 0):
        given = graph.example(number)[: len(graph.inputs)]
        named = {s.name: to_device_type(x) for s, x in zip(graph.inputs, given, strict=True)}
        with torch.no_grad():
            expected = graph.module(share.owner)(*given, *before[number])
        outputs = compiled(named, states[number])
        before[number] = expected[len(graph.outputs) :]
        said = tuple(map(to_device_type, expected[: len(graph.outputs)]))
        torch.testing.assert_close(outputs, said, atol=2e-5, rtol=0)
        for ours, theirs in zip(states, before, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert len(compilations) == 1


@pytest.mark.parametrize("names", [["code2wav"], ["code_predictor", "talker_decode"]])
def test_a_call_copies_one_buffer_to_the_device_and_one_back(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Also a frame's, whose two graphs run one after the other."""
    graphs = {graph.name: graph for graph in all_graphs(config, LEAN_PLAN)}
    outside, calls = OutsideGraphs(), []
    monkeypatch.setattr(graph_module, "compile_module", outside.compiler(run_eagerly))
    with outside:
        for graph in map(graphs.__getitem__, names):
            share = PartShare(part_spec(config, LEAN_PLAN, graph.part), Alone())
            share.allocate()
            state = tuple(torch.empty(s.shape, dtype=s.dtype, device=DEVICE) for s in graph.state)
            weights = Weights(share.owner, DEVICE)
            calls.append((CompiledGraph(graph, share.owner, weights, DEVICE), state))
        (first, state), *then = calls
        before = outside.counts.copy()
        given = {s.name: to_device_type(s.idle_input()) for s in graphs[names[0]].inputs}
        first(given, state, *then)
    assert outside.counts - before == {"copy_": 1, "_to_copy": 1}


TWO_WINDOWS = replace(TINY_PLAN, prompt_buckets=(12,), batches=(3,), chunk_frames=(4,))


def loaded(
    config: OmniConfig, checkpoint: Path, folder: Path, part: str, plan: CompilePlan = TWO_WINDOWS
) -> tuple[PartGraphs, LoadedPart]:
    """Load a part with two windows, and two recent rows a slot, in this process."""
    spec = part_spec(config, plan, part)
    folder.mkdir(parents=True, exist_ok=True)
    write_part_shards(spec, Checkpoint(checkpoint), folder)
    graphs = PartGraphs(spec, CPU, folder)
    return graphs, LoadedPart(spec.graphs, graphs.run)


def plant(graphs: PartGraphs) -> None:
    """Fill the whole state of slot 0 with NaN."""
    for tensor in graphs._state:
        tensor[0] = float("nan")


@pytest.mark.parametrize("name", ["thinker", "talker"])
def test_nan_in_a_slot_reaches_neither_others_nor_the_next_request(
    config: OmniConfig, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """The next one is short, beside a long one; then a cached prompt is copied to the slot."""
    graphs, part = loaded(config, checkpoint, tmp_path, name)
    width = decoder_config(config, name).hidden_size
    slots = GraphSlots(part)

    def prefill(slot: int, rows: int, start: int = 0) -> Tensor:
        given = torch.randn(rows, width, generator=seeded(rows))
        return slots.prefill(slot, given, torch.arange(rows).repeat(3, 1), start=start)[0]

    def step() -> Tensor:
        return slots._step(
            [0, 1, 2], torch.arange(3) if name == "thinker" else torch.ones(3, width)
        )[0]

    replies = []
    for planted in (False, True):
        for slot, rows in enumerate((20, 30, 9)):
            prefill(slot, rows)
        if planted:
            plant(graphs)
        said = [step()[1:]]
        if planted:
            others = [tensor[1:].clone() for tensor in graphs._state]
            slots.clear(0)
            assert all(map(torch.equal, (tensor[1:] for tensor in graphs._state), others))
        said += [prefill(0, 5), *(step() for _ in range(5))]
        slots.copy(2, 0, 9)
        said += [prefill(0, 2, start=9), step()]
        replies.append(torch.cat(said))
    assert replies[0].isfinite().all()
    assert torch.equal(replies[1], replies[0])


def test_a_stream_begins_anew_in_a_slot_of_nan(
    config: OmniConfig, checkpoint: Path, tmp_path: Path
) -> None:
    graphs, part = loaded(config, checkpoint, tmp_path, "code2wav")
    assert config.code2wav is not None
    vocoder = NeuronVocoder(part, config.code2wav)
    codes, sounds = list(torch.arange(24).view(2, 4, 3)), []
    for planted in (False, True):
        vocoder.start([1], codes[:1])
        if planted:
            plant(graphs)
        started = vocoder.start([0, 2], codes)
        sounds.append(np.concatenate([*started, *vocoder.step([0, 1], codes)]))
    assert np.array_equal(*sounds)
    assert abs(sounds[0]).max() > 0


def test_codes_are_marked_in_the_slot_whose_logits_are_not_finite(
    config: OmniConfig, checkpoint: Path, tmp_path: Path
) -> None:
    assert config.talker is not None
    _, part = loaded(config, checkpoint, tmp_path, "code_predictor")
    predictor = NeuronPredictor(part, config.talker.predictor.vocab_size, None)
    sampling = [PredictorSampling(5, 50, 1.0)] * 3
    hidden, frames = torch.randn(3, config.talker.text.hidden_size, generator=seeded(0)), []
    for row in (hidden[1].clone(), float("nan")):
        hidden[1], feedback = row, torch.zeros_like(hidden)
        codes = predictor.predict([2, 0, 1], [4, 5, 6], sampling, hidden, feedback)
        frames.append((codes, feedback[[2, 0]]))
    (expected, sums), (codes, others) = frames
    assert codes.tolist() == [*expected[:2].tolist(), [6, NOT_FINITE, NOT_FINITE]]
    assert torch.equal(others, sums)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frame_and_a_step_in_one_call_are_those_of_two(
    config: OmniConfig,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    """Bit for bit: slots in any order, flushes, a slot that begins anew, and one of NaN."""
    monkeypatch.setattr(graph_module, "compile_module", run_eagerly)
    plan = replace(TINY_PLAN, prompt_buckets=(12,), dtype=dtype)
    talkers = [talker_of(config, checkpoint, tmp_path / name, plan) for name in ("one", "two")]

    def fill(slot: int, rows: int) -> None:
        for talker in talkers:
            given = talker.text_rows(torch.arange(rows) + slot)
            talker._fill(slot, given, torch.arange(rows).repeat(3, 1), 0)

    for slot, rows in enumerate((9, 12, 5)):
        fill(slot, rows)
    turns = [[2, 0, 1], [0], [1, 2], [1, 0], [0, 1, 2], [2, 0], [1, 0, 2]]
    for turn, slots in enumerate(turns):
        ids = [19 if (turn, slot) == (4, 1) else slot for slot in slots]
        how = [PredictorSampling(100 * turn + slot, 50, 0.9) for slot in slots]
        told = [replace(one, token_id=i) for one, i in zip(how, ids, strict=True)]
        joined, apart = (
            t.predict(slots, ids, h) for t, h in zip(talkers, (told, how), strict=True)
        )
        assert torch.equal(joined, apart)
        right = talkers[1].step(slots, ids)
        if turn in (3, 5):
            fill(slots.pop(), 4)
        left = talkers[0].step(slots, ids[: len(slots)])
        assert torch.equal(left.nan_to_num(9), right.nan_to_num(9)[: len(slots)])
        assert talkers[0]._decoder._lengths == talkers[1]._decoder._lengths
        if turn == 4:
            assert left.isfinite().all(1).tolist() == [True, False, True]
            fill(1, 6)


def talker_of(
    config: OmniConfig, checkpoint: Path, folder: Path, plan: CompilePlan
) -> TalkerEngine:
    """A talker over its part and the code predictor's, in this process."""
    graphs = {
        name: loaded(config, checkpoint, folder / name, name, plan)[0]
        for name in ("talker", "code_predictor")
    }

    def run(name: str, label: str, inputs: Any, then: Graph | None = None) -> Any:
        following = [graphs[then.part].graph(then.label)] if then else []
        return graphs[name].run(label, inputs, *following)

    talker, predictor = (
        LoadedPart(part_spec(config, plan, name).graphs, partial(run, name))
        for name in ("talker", "code_predictor")
    )
    width = decoder_config(config, "talker").hidden_size
    table = torch.randn(20, width, generator=seeded(3)).to(getattr(torch, plan.dtype))
    table[19] = float("nan")
    slots = GraphSlots(talker)
    codes = NeuronPredictor(
        predictor, 64, lambda at, ids, frame: slots.step_ahead(at, table[ids], frame)
    )
    return TalkerEngine(config, slots, codes, table, lambda ids: table[ids], lambda x: x, 0)


def compiled_like(function: Callable[..., Any], *inputs: Tensor) -> None:
    with torch.no_grad():
        torch.compile(function, backend="neuron", fullgraph=True, dynamic=False)(*inputs)


@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (lambda x: x.double() + 1, (torch.ones(3),), "float64"),
        (lambda *x: torch.stack(x), tuple(torch.ones(65, 3)), "65 inputs, more than 64"),
        (lambda x: x + 1, (torch.ones(3, dtype=torch.int64),), "add computes with int64"),
        (lambda x: x > 1, (torch.ones(3, dtype=torch.int64),), "gt computes with int64"),
        (lambda x: torch.arange(3) * x, (torch.ones(3),), "arange computes with int64"),
        (lambda x: x * torch.fft.fft(x).real, (torch.ones(4),), "complex64"),
        (lambda x: x.cumsum(0), (torch.ones(3),), "aten.cumsum.default is left"),
        (lambda x: x.sort().values, (torch.ones(3),), "aten.sort.default is left"),
        (lambda x: x.as_strided((2,), (2,)) + 1, (torch.ones(4),), "as_strided.default is left"),
        (lambda x: x.split((1, 2))[1] + 1, (torch.ones(3),), "as_strided.default is left"),
        (lambda x: x[x < 2], (torch.ones(3),), "nonzero|data"),
        (lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(3),), "[Dd]ata-dependent"),
        (lambda x: x.new_zeros(int(x[0])), (torch.ones(3),), "[Dd]ata|[Uu]nbacked|is left"),
        (lambda x: logging.getLogger().handlers.append(x) or x, (torch.ones(3),), "raph break"),
    ],
)
def test_the_stand_in_refuses(function: Any, inputs: tuple[Tensor, ...], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        compiled_like(function, *inputs)
    assert isinstance(caught.value, Refused) or "torch._dynamo" in type(caught.value).__module__


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.zero_(), "zero_"),
        (lambda _: torch.zeros(2, device=DEVICE), "zeros"),
        (lambda x: x + torch.ones(3), "add"),
        (lambda x: x[0].copy_(x[1]), "copy_"),
        (lambda x: x.copy_(torch.ones(2, 3, dtype=torch.int32)), "copy_"),
        (lambda x: x.T.copy_(torch.ones(3, 2)), "copy_"),
        (lambda x: x.to(torch.bfloat16), "_to_copy"),
    ],
)
def test_the_stand_in_refuses_outside_of_graphs(function: Any, name: str) -> None:
    outside = OutsideGraphs()
    with outside:
        x = torch.empty(2, 3, device=DEVICE)
        for row in x:
            row.copy_(torch.zeros(3) + 1)
        (sums,) = outside.compiler(lambda *_: lambda x: (x + 1,))(torch.nn.Identity(), [x])(x)
        assert torch.equal(sums.to("cpu", copy=True) + 1, torch.full((2, 3), 3.0))
        assert outside.counts == {"empty": 1, "unbind": 1, "copy_": 2, "_to_copy": 1}
        with pytest.raises(Refused, match=f"^{name} runs on the device outside of graphs"):
            function(x)


def test_ranks_are_gathered_by_the_name_that_torch_keeps() -> None:
    """From 2.13 on torch warns of all_gather_tensor, the name that 2.9 has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.rand(2, 3)
            assert torch.equal(Collectives(1).gather(x), x)
    finally:
        dist.destroy_process_group()
    assert not [warning for warning in caught if "all_gather_tensor" in str(warning.message)]


def test_types_that_the_device_lacks_are_refused_before_anything_is_compiled(
    config: OmniConfig,
) -> None:
    wide = next(iter(all_graphs(config, replace(TINY_PLAN, dtype="float64"))))
    with pytest.raises(AssertionError, match="float64"):
        owner = torch.nn.Identity()
        CompiledGraph(wide, owner, Weights(owner, CPU), CPU)
    assert isinstance(wide, Graph)
