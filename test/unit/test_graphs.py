"""The graphs that a compiler traces: static, and equal to the models they are made of."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.engines.noise import noise_of_frame
from qwen3_omni_neuron.model.code_predictor import top_p_limits
from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.decoder import Attention
from qwen3_omni_neuron.model.kv_cache import (
    KvCache,
    PromptCache,
    Segments,
    SlotCache,
    StepState,
    flushed,
)
from qwen3_omni_neuron.model.moe import MoeFeedForward
from qwen3_omni_neuron.neuron.graphs import weights
from qwen3_omni_neuron.neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import LoadedPart, device_type, part_spec
from qwen3_omni_neuron.neuron.shards import PartShare
from qwen3_omni_neuron.neuron.slots import GraphSlots
from qwen3_omni_neuron.prompt.prompt import rope_positions
from testing.export import export_graph, open_shapes, rejected_ops
from testing.graph_cases import TINY_PLAN, with_weights
from testing.models import load_models
from testing.outlier import talker_models
from testing.released import RELEASED
from testing.repeats import again
from testing.specs import plan_of
from testing.tiny import write_tiny_checkpoint
from testing.torchneuron.backend import MOST_INPUTS
from testing.torchneuron.leaner import write_leaner_checkpoint

pytestmark = pytest.mark.usefixtures("no_gradients")
EXACT = {"atol": 0.0, "rtol": 0.0}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # other orders of the same sums
LATENCY = 555  # samples


@pytest.fixture(scope="module")
def static(config, models) -> Models:
    return with_weights(static_models(config, torch.float32), models)


@pytest.fixture(scope="module")
def graphs(config) -> dict[str, Graph]:
    return {g.label: g for g in all_graphs(config, TINY_PLAN)}


def state_of(segments: Segments) -> KvCache:
    tensors = torch.cat(segments, 3).transpose(0, 1)
    return KvCache(tensors[::2], tensors[1::2])


KINDS = (
    "audio_encoder", "vision_encoder", "thinker_prefill", "thinker_flush", "thinker_decode",
    "text_projection", "hidden_projection", "talker_prefill", "talker_flush", "talker_decode",
    "code_predictor", "code2wav",
)  # fmt: skip


def test_every_kind_of_graph_is_there_at_every_bucket(graphs) -> None:
    plan = TINY_PLAN
    counts = {kind: sum(g.name == kind for g in graphs.values()) for kind in KINDS}
    assert sum(counts.values()) == len(graphs)
    assert counts["audio_encoder"] == counts["vision_encoder"] == 2
    assert (
        counts["thinker_decode"]
        == counts["talker_decode"]
        == len(plan.batches) * len(plan.decode_buckets)
    )
    assert counts["thinker_prefill"] == counts["talker_prefill"] == 4
    sizes = [g.bucket for g in graphs.values() if g.name == "talker_prefill"]
    assert [(size["rows"], size["window"]) for size in sizes] == [
        (12, 16), (16, 16), (12, 64), (40, 64),
    ]  # fmt: skip
    assert counts["thinker_flush"] == counts["talker_flush"] == len(plan.decode_buckets)
    assert counts["code2wav"] == len(plan.batches) * len(plan.chunk_frames)
    assert counts["code_predictor"] == 1
    assert {g.part for g in graphs.values()} == set(PARTS)


# The largest of a kind repeats the smallest, but a step of one row takes experts in another way.
SIZES = [
    *((kind, 0) for kind in KINDS),
    *((kind, -1) if kind.endswith("_decode") else again(kind, -1) for kind in KINDS),
]


@pytest.fixture(scope="module")
def leaner(tmp_path_factory) -> tuple[list[Graph], Models]:
    """All graphs of a checkpoint with fewer layers and codes, and its static modules."""
    folder = write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))
    config = read_config(folder)
    weights = load_models(Checkpoint(folder), config, torch.float32)
    static = with_weights(static_models(config, torch.float32), weights)
    return list(all_graphs(config, TINY_PLAN)), static


@pytest.mark.parametrize(("kind", "place"), SIZES)
def test_every_graph_is_static_and_gives_what_its_row_says(leaner, kind, place) -> None:
    graphs, static = leaner
    graph = [g for g in graphs if g.name == kind][place]
    owner = getattr(static, graph.part)
    program = export_graph(graph, owner)
    assert not open_shapes(program)
    assert not rejected_ops(program)
    example = graph.example(1)
    given = program.module()(*example)
    torch.testing.assert_close(given, graph.module(owner)(*example), **EXACT)
    said = [(s.shape, s.dtype) for s in (*graph.outputs, *graph.state)]
    assert [(tuple(t.shape), t.dtype) for t in given] == said
    state = zip(given[len(graph.outputs) :], example[len(graph.inputs) :], strict=True)
    for renewed, old in state:
        is_read = renewed is old  # and comes out as it is
        assert is_read or renewed.data_ptr() != old.data_ptr(), "state is a value"


def test_the_experts_of_the_cpu_are_no_static_graph(graphs, models) -> None:
    """The test above sees operations whose sizes follow the data."""
    with pytest.raises(Exception, match=r"(?i)data.dependent|could not|unsupported|script"):
        program = export_graph(graphs["thinker_prefill[rows=40,window=64]"], models.thinker)
        raise RuntimeError(f"unsupported: {open_shapes(program) or rejected_ops(program)[0]}")


def test_rejected_operations_are_seen() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            more = nn.functional.conv_transpose1d(x.view(1, 1, 4), x.view(1, 1, 4), stride=2)
            return x.cumsum(0), x.sort().values, x.double(), x.long().cumsum(0), more

    spec = (TensorSpec("x", (4,), torch.float32),)
    graph = Graph("bad", {}, "", lambda owner, x, state: (owner(*x), state), spec, ())
    found = rejected_ops(export_graph(graph, Bad()))
    kinds = ["conv_transpose1d", "cumsum of torch.float32", "sort", "torch.float64"]
    assert [f.split(": ")[1] for f in found] == kinds


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shared", [0, 6])
def test_experts_of_static_graphs_are_the_experts(normalize, shared) -> None:
    """By those that few rows chose, and by all; also where all rows want the same experts."""
    torch.manual_seed(1)
    sizes = MoeConfig(20, 3, 5, normalize, shared)
    loop = MoeFeedForward(10, sizes).double()
    for parameter in loop.parameters():
        nn.init.normal_(parameter)
    static = MoeFeedForward(10, replace(sizes, static=True)).double()
    static.load_state_dict(loop.state_dict())
    assert static.few_rows == 2
    for rows in (1, 2, 3, 50, 133):
        for spread in (1.0, 1e-3):  # nearly equal rows choose alike
            x = torch.randn(1, 10).double() + spread * torch.randn(rows, 10).double()
            expected = loop(x)
            torch.testing.assert_close(static(x), expected, atol=1e-9, rtol=1e-9)
            assert expected.abs().max() > 1, "the experts do something"


@pytest.mark.parametrize("part", ["thinker", "talker"])
@pytest.mark.parametrize("rows", [13, 40])
def test_prefill_and_steps_are_those_of_the_cpu(
    graphs, static, models, config, part,
    rows
) -> None:  # fmt: skip
    """A prompt of bucket + 1 and of exactly a bucket into slot 2, then three steps beside idle
    rows: the CPU's logits, and no other slot is touched."""
    c = config.thinker.text if part == "thinker" else config.talker.text
    model = getattr(static, part)
    torch.manual_seed(rows)
    prompt = torch.randn(rows, c.hidden_size)
    cache = KvCache.zeros(c, 1, 64, torch.float32)
    prefill = graphs[f"{part}_prefill[rows=40,window=64]"]
    step = graphs[f"{part}_decode[slots=3,window=64]"]
    flush = graphs[f"{part}_flush[window=64]"]
    lines = [torch.randn(spec.shape) for spec in prefill.state]
    before = [line.clone() for line in lines]
    positions, last = rope_positions(rows), torch.tensor([rows - 1])
    expected = getattr(models, part).prefill(prompt, positions, last, PromptCache(cache))
    padded = torch.full((40, c.hidden_size), 9.0)
    padded[:rows] = prompt
    far = torch.full((3, 40), 55.0)
    far[:, :rows] = positions
    added = [torch.zeros(spec.shape) for spec in prefill.inputs if spec.is_optional]
    logits, hidden, *state = prefill.module(model)(
        padded, far, last, torch.tensor([2]), torch.tensor([0]), *added, *lines
    )
    torch.testing.assert_close(logits, expected[0], **CLOSE)
    torch.testing.assert_close(hidden[: len(expected[1])], expected[1], **CLOSE)
    for old, saved, new in zip(lines, before, state, strict=True):
        torch.testing.assert_close(old, saved, **EXACT)
        torch.testing.assert_close(new[:2], saved[:2], **EXACT)
    held = torch.tensor([64, 64, rows])
    for length in range(rows, rows + 3):
        count = length - int(held[2])
        if count == 2:
            source = torch.tensor([0])
            counts = torch.tensor([0, 0, count])
            state = [*flush.module(model)(held, counts, source, source, *state)]
            held[2], count = length, 0
        row = torch.tensor([7]) if part == "thinker" else torch.randn(1, c.hidden_size)
        at = torch.tensor([length])
        one = SlotCache(cache.window(length + 1), torch.tensor([0]), at)
        wanted = getattr(models, part).decode(row, at.float(), one)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        codes = (spec.idle_input() for spec in step.inputs[:-5])
        given = step.module(model)(
            *codes, torch.cat((row, row, row)), torch.full((3,), float(length)), held,
            torch.tensor([-1, -1, count]), torch.arange(3), *state,
        )  # fmt: skip
        for value, correct in zip(given, wanted, strict=False):
            torch.testing.assert_close(value[2:], correct, **CLOSE)
            assert value.isfinite().all(), "an idle row is a number"
        kept, state = state, list(given[len(step.outputs) :])
        for old, new in zip(kept, state, strict=True):
            torch.testing.assert_close(new[:2], old[:2], **EXACT)
    written = state_of(tuple(state[1:]))
    torch.testing.assert_close(
        written.keys[:, 2, :, : rows + 2], cache.keys[:, 0, :, : rows + 2], **CLOSE
    )


@pytest.mark.parametrize("order", [None, [2, 0, 3]])
def test_rows_of_a_step_are_seen_and_kept_as_the_cpu_does(order) -> None:
    """Bit for bit; slots in order, or named, one of them of an idle row."""
    torch.manual_seed(0)
    segments = tuple(torch.randn(3, 4, 2, positions, 3) for positions in (5, 3))
    recent = torch.zeros(3, 4, 2, 2, 3)
    held, counts = torch.tensor([4, 5, 0]), torch.tensor([0, 1, -1])
    slots = [0, 1] if order is None else order[:2]
    named = None if order is None else torch.tensor(order)
    every = flushed(segments, recent, torch.full((3,), 8), torch.zeros(3).long(), *[named_0()] * 2)
    torch.testing.assert_close(every, segments, **EXACT)
    cache = state_of(segments)
    cache = KvCache(cache.keys.clone(), cache.values.clone())
    for layer in range(2):  # slots[1] has one recent row, behind five
        recent[slots[1], 2 * layer : 2 * layer + 2, :, 0] = 7.0 + layer
        cache.keys[layer, slots[1], :, 5] = cache.values[layer, slots[1], :, 5] = 7.0 + layer
    pure = StepState(recent, segments, named, held, counts)
    placed = SlotCache(cache, torch.tensor(slots), torch.tensor([4, 6]))
    for layer in range(2):
        new = torch.randn(3, 2, 1, 3), torch.randn(3, 2, 1, 3)
        ((keys, values),) = placed.append(layer, new[0][:2], new[1][:2])
        parts = pure.append(layer, *new)
        for row in range(2):
            ours, theirs = pure.mask[row, 0, 0], placed.mask[row, 0, 0]
            for index, expected in enumerate((keys, values)):
                seen = torch.cat([part[index] for part in parts], 2)[row, :, ~ours]
                torch.testing.assert_close(seen, expected[row, :, ~theirs], **EXACT)
    ends = torch.zeros(3, dtype=torch.int64)
    for slot, count in zip(slots, (1, 2), strict=True):
        ends[slot] = count
    starts = torch.full((3,), 8)
    starts[slots] = held[:2]
    written = state_of(flushed(segments, pure.new_recent, starts, ends, *[named_0()] * 2))
    for slot, length in zip(slots, (5, 7), strict=True):
        for ours, theirs in ((written.keys, cache.keys), (written.values, cache.values)):
            torch.testing.assert_close(
                ours[:, slot, :, :length], theirs[:, slot, :, :length], **EXACT
            )
    (other,) = {0, 1, 2} - {*slots}
    torch.testing.assert_close(written.keys[:, other], cache.keys[:, other], **EXACT)
    torch.testing.assert_close(pure.new_recent[other], recent[other], **EXACT)


def named_0() -> Tensor:
    return torch.tensor([0])


def test_padded_rows_of_pictures_change_nothing(graphs, static, models, config) -> None:
    """Deepstack adds zeros to the others."""
    graph = graphs["thinker_prefill[rows=40,window=64]"]
    rows, positions, last, slot, start, deepstack, *state = graph.example(3)
    start[:], last[:] = 0, 39
    deepstack[:, [row for row in range(40) if row not in (3, 4, 5, 9)]] = 0
    cache = PromptCache(KvCache.zeros(config.thinker.text, 1, 64, torch.float32))
    expected = models.thinker.prefill(rows, positions, last, cache, deepstack)
    module = graph.module(static.thinker)
    given = module(rows, positions, last, slot, start, deepstack, *state)
    torch.testing.assert_close(given[:2], expected, **CLOSE)
    text = module(rows, positions, last, slot, start, torch.zeros_like(deepstack), *state)
    assert not torch.allclose(text[0], expected[0])


@pytest.mark.parametrize("width", [1, 8, 40, 41, 57, 99, 100])
def test_one_audio_graph_holds_for_every_chunk_width(models, width) -> None:
    encoder = models.audio_encoder
    mel = torch.randn(2, encoder.config.mel_bins, 800, generator=torch.Generator().manual_seed(1))
    mel.unflatten(2, (8, 100))[..., width:] = 0
    valid = torch.ones(2, 104, dtype=torch.bool)
    expected = encoder(mel, valid, width)
    torch.testing.assert_close(encoder(mel, valid, torch.tensor([width])), expected, **EXACT)


def codes_of(streams: int, frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 64, (streams, 16, frames), generator=generator)


def garbage_state(graph: Graph) -> list[Tensor]:
    """State that earlier streams left, in every slot."""
    return [*graph.example(7)[len(graph.inputs) :]]


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 1]])
def test_code2wav_graphs_make_streams_in_any_slots(graphs, static, slots) -> None:
    codes = codes_of(3, 9)
    short = graphs["code2wav[streams=3,frames=1]"].module(static.code2wav)
    long = graphs["code2wav[streams=3,frames=4]"].module(static.code2wav)
    one = graphs["code2wav[streams=1,frames=4]"].module(static.code2wav)
    (state,) = garbage_state(graphs["code2wav[streams=3,frames=1]"])
    zero = torch.zeros(3, dtype=torch.int64)
    first, state = short(codes[:, :, :1], torch.tensor(slots), zero, state)
    turned = [1, 2, 0]
    second, state = long(
        codes[turned, :, 1:5], torch.tensor([slots[stream] for stream in turned]), zero + 1, state
    )
    third = []
    for stream in (2, 0, 1):
        slot, at = torch.tensor([slots[stream]]), torch.tensor([5])
        sound, state = one(codes[stream, None, :, 5:], slot, at, state)
        third.append((stream, sound))
    joined = torch.cat((first, second[[2, 0, 1]], torch.cat([s for _, s in sorted(third)])), 1)
    torch.testing.assert_close(joined[:, LATENCY:], static.code2wav(codes), **CLOSE)


@pytest.mark.parametrize("frames", [1, 2, 4, 8, 25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_start_is_a_step_over_zeros(models, frames, dtype) -> None:
    code2wav = copy.deepcopy(models.code2wav).to(dtype)
    codes, tolerance = codes_of(2, frames), {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    expected, state = code2wav.start(codes)
    zeros = tuple(map(torch.zeros_like, state))
    samples, left = code2wav.step(codes, zeros, torch.tensor([True, True]))
    torch.testing.assert_close(samples[:, LATENCY:], expected, atol=tolerance, rtol=0)
    for ours, theirs in zip(left, state, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    wrong, _ = code2wav.step(codes, zeros)
    assert (wrong[:, LATENCY:] - expected).abs().max() > 1e-3, "zeros alone are no start"


def test_a_row_without_a_slot_touches_no_stream(graphs, static) -> None:
    codes, idle = codes_of(3, 5), TINY_PLAN.max_concurrency
    short = graphs["code2wav[streams=3,frames=1]"]
    long = graphs["code2wav[streams=3,frames=4]"].module(static.code2wav)
    (before,) = garbage_state(short)
    rows = torch.tensor([idle, 1, idle])
    first, state = short.module(static.code2wav)(
        codes[:, :, :1], rows, torch.tensor([0, 0, 3]), before
    )
    second, after = long(codes[:, :, 1:], rows, torch.tensor([0, 1, 3]), state)
    sound = torch.cat((first, second), 1)
    torch.testing.assert_close(sound[1:2, LATENCY:], static.code2wav(codes[1:2]), **CLOSE)
    assert sound.isfinite().all()
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], **EXACT)
    assert after.isfinite().all() and not torch.equal(after[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_attended_by_sums_are_those_by_products(tmp_path, monkeypatch, dtype) -> None:
    """Also in bfloat16: both round scores and results alone."""

    def prompt(self: Attention, q: Tensor, keys: Tensor, values: Tensor, _: object) -> Tensor:
        later = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(1)
        return self._by_products(q, ((keys, values),), later[None, None])

    monkeypatch.setattr(Attention, "_prompt", prompt)
    outlier = write_tiny_checkpoint(tmp_path, outlier=True)  # its predictor has several layers
    predictor = talker_models(outlier, dtype).code_predictor
    frames, (codes, vocabulary, width) = 100, predictor.head.shape
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(frames, width, generator=generator).to(dtype)
    code0 = torch.randint(0, vocabulary, (frames,), generator=generator)
    noise = torch.from_numpy(noise_of_frame(1, frames * codes, vocabulary)).view(frames, codes, -1)
    how = noise, top_p_limits([0.8] * frames), 50, torch.full((frames,), 50)
    expected = predictor(hidden, code0, *how)
    torch.testing.assert_close(predictor(hidden, code0, *how, by_sums=True), expected, **EXACT)


def test_attending_and_sampling_by_sums_gives_the_same_codes(graphs, static, models) -> None:
    """One graph for every top_k up to the compiled one, each row with its own. Rounded otherwise,
    so that an id at the edge of top-p could differ: in none of these 3600 draws."""
    graph = graphs["code_predictor[slots=3,top_k=50]"]
    module = graph.module(static.code_predictor)
    for seed in range(80):
        *inputs, top_k = graph.example(seed)[:5]
        top_k, step = top_k.clamp(min=1), graph.example(seed)[5:]
        if seed % 4 == 0:
            top_k[:2] = torch.tensor([1, TINY_PLAN.predictor_top_k])
        codes, feedback, *rest = module(*inputs, top_k, *step)
        assert all(map(torch.equal, rest, step[1:]))
        for row, k in enumerate(top_k.tolist()):
            alone = [tensor[row : row + 1] for tensor in inputs]
            expected, sums = models.code_predictor(*alone, top_k=k)
            torch.testing.assert_close(codes[row : row + 1], expected, **EXACT)
            torch.testing.assert_close(feedback[row : row + 1] - step[0][row], sums, **CLOSE)


def test_idle_inputs_of_every_graph_give_finite_outputs(graphs, static) -> None:
    """A row that attends to nothing would give NaN."""
    for graph in graphs.values():
        quiet = [spec.idle_input() for spec in (*graph.inputs, *graph.state)]
        for given in graph.module(getattr(static, graph.part))(*quiet):
            assert given.isfinite().all(), graph.label


RECENT = 2  # rows of a slot, an eighth of the shortest window


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def slots(config, called) -> GraphSlots:
    """The talker's three slots, in windows of 16 and 64 positions. Outputs are zeros."""
    plan = replace(TINY_PLAN, target="torchneuron")
    graphs = {g.label: g for g in all_graphs(config, plan) if g.part == "talker"}

    def run(label: str, _: dict[str, Tensor]) -> list[Tensor]:
        called.append(label)
        outputs = graphs[label].outputs
        return [torch.zeros(spec.shape, dtype=device_type(spec.dtype)) for spec in outputs]

    return GraphSlots(LoadedPart(graphs.values(), run))


def test_a_flush_takes_the_window_of_the_slots_that_are_full(config, slots, called) -> None:
    """A long slot beside them has room: its own window is not renewed."""
    width = config.talker.text.hidden_size
    for slot, rows in ((0, 5), (1, 30)):
        slots.prefill(slot, torch.zeros(rows, width), torch.zeros(3, rows))
    for _ in range(RECENT):
        slots.step([0], torch.zeros(1, width))
    called.clear()
    slots.step([0, 1], torch.zeros(2, width))
    assert called == ["talker_flush[window=16]", "talker_decode[slots=3,window=64]"]


CPU = torch.device("cpu")


class Owner(nn.Module):
    """Matrices of two shapes and types, and small weights and constants of several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 6) for _ in range(5))
        self.wide = nn.Linear(6, 4)
        self.int8 = nn.Parameter(torch.randint(-9, 9, (6, 4)).to(torch.int8), requires_grad=False)
        self.matrix = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("numbers", torch.arange(3, dtype=torch.int32))


@pytest.fixture
def owner() -> Owner:
    torch.manual_seed(0)
    return Owner()


@pytest.mark.parametrize(
    ("most", "shapes"),
    [
        (2**31, [(5, 6, 4), (1, 4, 6), (1, 6, 4), (5 * 6 + 4 + 6,), (3,)]),
        (60, [(2, 6, 4), (2, 6, 4), (1, 6, 4), (1, 4, 6), (1, 6, 4), (5 * 6 + 4 + 6,), (3,)]),
    ],
)
def test_every_weight_is_a_contiguous_view_of_few_tensors(owner, monkeypatch, most, shapes) -> None:
    monkeypatch.setattr(weights, "SMALL", 24)
    monkeypatch.setattr(weights, "MOST_ELEMENTS", most)
    held = Weights(owner, CPU)
    assert sorted(tuple(t.shape) for t in held.tensors) == sorted(shapes)
    views = held.views(held.tensors)
    expected = dict([*owner.named_parameters(), *owner.named_buffers()])
    assert views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor), name
        assert views[name].is_contiguous(), name
    others = [torch.zeros_like(t) for t in held.tensors]
    assert not any(view.any() for view in held.views(others).values())


@pytest.mark.parametrize("tp", [again(1), again(4), 8])
@pytest.mark.parametrize("dtype", ["int8", again("bfloat16")])
def test_the_released_graphs_have_few_inputs_below_the_devices_limit(dtype, tp) -> None:
    """Counted with every weight of the part, of which a graph may use some."""
    plan = replace(plan_of(Path(), RELEASED, "torchneuron", tp=8, dtype=dtype), tp=Degrees.same(tp))
    for part in PARTS:
        spec = part_spec(RELEASED, plan, part)
        held = Weights(PartShare(spec, Alone()).owner, torch.device("meta"))
        assert max(tensor.numel() for tensor in held.tensors) < 2**31
        given = max(len(graph.inputs) + len(graph.state) for graph in spec.graphs)
        assert given + len(held.tensors) <= MOST_INPUTS, part
