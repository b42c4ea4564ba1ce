"""A request whose numbers are not finite ends alone: nothing of it reaches another request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.sampling import NOT_FINITE
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.engines import NeuronPredictor, NeuronVocoder
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.part import LoadedPart, part_spec
from qwen3_omni_neuron.neuron.shards import write_part_shards
from qwen3_omni_neuron.neuron.slots import GraphSlots
from qwen3_omni_neuron.neuron.torchneuron.graph import PartGraphs
from testing.graph_cases import TINY_PLAN
from testing.torchneuron.backend import standing_in
from testing.torchneuron.leaner import CODE_GROUPS, write_leaner_checkpoint

# Windows of 16 and 64 positions, and two recent rows a slot.
PLAN = replace(TINY_PLAN, prompt_buckets=(12,), batches=(3,), chunk_frames=(4,))
MakePart = Callable[[str], tuple[PartGraphs, LoadedPart]]


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture
def make_part(checkpoint: Path, config: OmniConfig, tmp_path: Path) -> Iterator[MakePart]:
    """Return a function that loads a part in this process."""

    def make(name: str) -> tuple[PartGraphs, LoadedPart]:
        spec = part_spec(config, PLAN, name)
        write_part_shards(spec, Checkpoint(checkpoint), tmp_path)
        graphs = PartGraphs(spec, torch.device("cpu"), tmp_path)
        return graphs, LoadedPart(spec.graphs, graphs.run)

    with standing_in():
        yield make


def plant(graphs: PartGraphs) -> None:
    """Fill the whole state of slot 0 with NaN."""
    for tensor in graphs._state:
        tensor[0] = float("nan")


@pytest.mark.parametrize("name", ["thinker", "talker"])
def test_nan_in_a_slot_reaches_no_other_one_nor_its_next_requests(
    make_part: MakePart, config: OmniConfig, name: str
) -> None:
    """The next request is short, beside a long one; then a cached prompt is copied to the slot."""
    graphs, part = make_part(name)
    width = decoder_config(config, name).hidden_size

    def prefill(slots: GraphSlots, slot: int, rows: int, start: int = 0) -> Tensor:
        given = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        return slots.prefill(slot, given, torch.arange(rows).repeat(3, 1), start=start)[0]

    def step(slots: GraphSlots, named: list[int]) -> Tensor:
        rows = torch.tensor(named) if name == "thinker" else torch.ones(len(named), width)
        return slots._step(named, rows)[0]

    replies = []
    for planted in (False, True):
        slots = GraphSlots(part, name)
        for slot, rows in enumerate((20, 30, 9)):
            prefill(slots, slot, rows)
        if planted:
            plant(graphs)
        said = [step(slots, [0, 1, 2])[1:]]
        others = [tensor[1:].clone() for tensor in graphs._state]
        if planted:
            slots.clear(0)
            for tensor, before in zip(graphs._state, others, strict=True):
                assert torch.equal(tensor[1:], before)
            assert not torch.cat(graphs._state[1:], 3)[0].any()
        said += [prefill(slots, 0, 5)]
        said += [step(slots, [0, 1, 2]) for _ in range(5)]
        slots.copy(2, 0, 9)
        said += [prefill(slots, 0, 2, start=9), step(slots, [0, 1])]
        replies.append(torch.cat(said))
    assert replies[0].isfinite().all()
    assert torch.equal(replies[1], replies[0])


def test_a_stream_starts_as_new_in_a_slot_of_nan(make_part: MakePart, config: OmniConfig) -> None:
    """It begins beside one that goes on: neither reads the state that an earlier one has left."""
    graphs, part = make_part("code2wav")
    assert config.code2wav is not None
    codes = list(torch.arange(8 * CODE_GROUPS).view(2, 4, CODE_GROUPS))
    sounds = []
    for planted in (False, True):
        vocoder = NeuronVocoder(part, config.code2wav)
        vocoder.start([1], codes[:1])
        if planted:
            plant(graphs)
        started = vocoder.start([0, 2], codes)
        sounds.append([*started, *vocoder.step([0, 1, 2], [*codes, codes[0]])])
    for sound, expected in zip(sounds[1], sounds[0], strict=True):
        assert abs(expected).max() > 0
        assert (sound == expected).all()


def test_codes_whose_logits_are_not_finite_are_marked_in_their_slot_alone(
    make_part: MakePart, config: OmniConfig
) -> None:
    _, part = make_part("code_predictor")
    assert config.talker is not None
    vocabulary, width = config.talker.predictor.vocab_size, config.talker.text.hidden_size
    predictor = NeuronPredictor(part, vocabulary)
    hidden = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    sampling = PredictorSampling(np.full(CODE_GROUPS - 1, 0.5, np.float32), 50, 1.0)
    frames = []
    for row in (hidden[1].clone(), torch.full((width,), float("nan"))):
        hidden[1] = row
        feedback = torch.zeros(3, width)
        codes = predictor.predict([2, 0, 1], [4, 5, 6], [sampling] * 3, hidden, feedback)
        frames.append((codes, feedback[[2, 0]]))
    for given, expected in zip(frames[1], frames[0], strict=True):
        assert torch.equal(given[:2], expected[:2])
    assert frames[0][0].min() >= 0
    assert frames[1][0][2].tolist() == [6, *[NOT_FINITE] * (CODE_GROUPS - 1)]
