"""The talker over NxDI's CPU mode against the CPU engine: see nxdi_sources."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from testing.media_cases import CASES
from testing.neuron.alike import GREEDY, SPEAKER, assert_close, assert_speaks_alike
from testing.prompts import prompt_of

BothEngines = tuple[Engines, Engines]
BUCKET, DECODE_BUCKET = 48, 64


@pytest.mark.parametrize("name", CASES)
def test_codes_after_prompts_with_media(both, prompt_builder, name) -> None:
    case = CASES[name]
    prompt = prompt_builder.prompt(case.messages, case.use_audio_in_video)
    assert_speaks_alike(*both, 1, prompt, frames=5)


@pytest.mark.parametrize("rows", [BUCKET - 1, BUCKET, BUCKET + 1, DECODE_BUCKET - 2])
def test_prompts_at_the_edges_of_buckets_speak_as_on_the_cpu(both, rows) -> None:
    """Text alone: the prompt is filled before the first token, which is then a step."""
    tokens = torch.arange(rows - ASSISTANT_ROWS) % 200 + 1
    assert_speaks_alike(*both, 0, prompt_of(tokens), frames=5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 0], [1]])
def test_frames_of_several_slots_in_any_order_with_others_idle(both, order) -> None:
    assert_turns_alike(both, (order, order, [1, 0, 2]))  # those that were idle go on


@pytest.mark.parametrize("order", [[3, 1], [4, 0, 2], [2, 4, 1, 0]])
def test_frames_of_graphs_between_one_slot_and_all(both_of_five, order) -> None:
    """Three slots take the graph of four, with an idle row."""
    assert_turns_alike(both_of_five, (order, order, [1, 4, 0, 2, 3]))


@torch.inference_mode()
def test_a_cleared_slot_has_no_nan_where_prompts_do_not_reach(both_of) -> None:
    """The last row of a reply was NaN, too. Without the call the next one beside a long one is."""
    slots: Any = both_of(talker_context_length=320)[1].talker._decoder  # type: ignore[union-attr]
    cache = slots._graphs.context_encoding_model.model.kv_mgr.past_key_values

    def prefill(slot: int, rows: int) -> None:
        slots.prefill(slot, torch.ones(rows, 64), torch.arange(rows).repeat(3, 1))

    def finite() -> list[bool]:
        return slots.step([0, 1], torch.ones(2, 64))[0].isfinite().all(1).tolist()

    for clears in (False, True):
        for slot in (0, 1):
            prefill(slot, 256)
        assert finite() == [True, True]
        for tensor in cache:
            tensor.data[0, :, :256] = float("nan")
        assert finite() == [False, True]
        before = [tensor[1:, :, :320].clone() for tensor in cache]
        if clears:
            slots.clear(0)
        assert all(map(torch.equal, (tensor[1:, :, :320] for tensor in cache), before))
        prefill(0, 5)
        assert finite() == [clears, True]


def assert_turns_alike(both: BothEngines, turns: Sequence[list[int]]) -> None:
    """Each turn is a frame of those slots, after prompts of several lengths in every slot."""
    spoken = []
    for engines in both:
        talker: Any = engines.talker
        logits: dict[int, torch.Tensor] = {}
        for slot, rows in enumerate((45, 3, 70, 20, 33)[: talker.slots]):
            prompt = prompt_of(torch.arange(rows) % 150 + 7 * slot + 1)
            talker.prepare(slot, prompt.talker, SPEAKER)
            logits[slot] = talker.prefill(slot, torch.zeros(0, 64), 9 + slot)
        frames = []
        for turn in turns:
            code0 = [int(logits[slot].argmax()) for slot in turn]
            frames.append(talker.predict(turn, code0, [GREEDY] * len(turn)).tolist())
            stepped = talker.step(turn, [11 + slot for slot in turn])
            logits |= dict(zip(turn, stepped.split(1), strict=True))
        spoken.append((frames, torch.cat([logits[slot] for slot in range(talker.slots)])))
    assert spoken[1][0] == spoken[0][0]
    assert_close(spoken[1][1], spoken[0][1])
