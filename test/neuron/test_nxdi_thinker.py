"""The thinker over NxDI's CPU mode against the CPU engine: see nxdi_sources."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import BucketError
from testing.media_cases import CASES, IMAGE, audio, text, user
from testing.neuron.alike import assert_prefills_alike, assert_steps_alike
from testing.prompts import prompt_of

BothEngines = tuple[Engines, Engines]
BUCKETS, DECODE_BUCKET, CONTEXT_LENGTH = (48, 96), 64, 256


def text_prompt(rows: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return prompt_of(torch.randint(1, 200, (rows,), generator=generator))


def cache_of(thinker: Any) -> list[torch.Tensor]:
    """Copy the KV cache: keys and values [slots, kv_heads, positions, head_dim] of each layer."""
    cache = thinker._decoder._graphs.context_encoding_model.model.kv_mgr.past_key_values
    return [tensor.clone() for tensor in cache]


@pytest.mark.parametrize("name", CASES)
def test_prompts_with_media_and_the_replies_to_them(both, prompt_builder, name) -> None:
    case = CASES[name]
    prompt = prompt_builder.prompt(case.messages, case.use_audio_in_video)
    ours, theirs = (engines.thinker for engines in both)
    token = assert_prefills_alike(ours, theirs, 1, prompt)
    assert_steps_alike(ours, theirs, [1], [token], steps=6)


@pytest.mark.parametrize("rows", [1, 2, 47, 48, 49, 95, 96, 97, 255])
def test_prompts_at_the_edges_of_buckets_give_the_cpus_logits(both, rows) -> None:
    ours, theirs = (engines.thinker for engines in both)
    token = assert_prefills_alike(ours, theirs, 0, text_prompt(rows))
    assert_steps_alike(ours, theirs, [0], [token], steps=1)


@pytest.mark.parametrize(("words", "bucket"), [(1, 48), (25, 96), (60, 256)])
def test_the_accept_layer_leaves_every_bucket(both, prompt_builder, words, bucket) -> None:
    """A picture and a clip, before and after as much text as fills the bucket."""
    padding = text("a " * words)
    prompt = prompt_builder.prompt([user(padding, IMAGE, audio(0.7), padding)])
    assert bucket_of(len(prompt), (*BUCKETS, CONTEXT_LENGTH), "rows") == bucket
    ours, theirs = (engines.thinker for engines in both)
    assert_prefills_alike(ours, theirs, 2, prompt)


@pytest.mark.parametrize("rows", [DECODE_BUCKET - 3, 2 * DECODE_BUCKET - 3])
def test_a_reply_grows_past_a_decode_bucket(both, rows) -> None:
    ours, theirs = (engines.thinker for engines in both)
    token = assert_prefills_alike(ours, theirs, 1, text_prompt(rows))
    assert_steps_alike(ours, theirs, [1], [token], steps=7)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 0], [1, 2], [1]])
def test_the_thinkers_steps_of_slots_in_any_order_are_the_cpus(both, order) -> None:
    """Then the slots that were idle go on, as if nothing had been."""
    ours, theirs = (engines.thinker for engines in both)
    tokens = [
        assert_prefills_alike(ours, theirs, slot, text_prompt(rows, slot))
        for slot, rows in enumerate((63, 12, 90))
    ]
    last = assert_steps_alike(ours, theirs, order, [tokens[slot] for slot in order], steps=4)
    for slot, token in zip(order, last, strict=True):
        tokens[slot] = token
    assert_steps_alike(ours, theirs, [1, 0, 2], [tokens[1], tokens[0], tokens[2]], steps=3)


@pytest.mark.parametrize(
    "order", [[4], [3, 1], [4, 0, 2], [2, 4, 1, 0], [1, 3], [0, 4, 3, 2, 1]], ids=str
)
def test_steps_in_graphs_for_fewer_than_all_slots_are_the_cpus(both_of_five, order) -> None:
    """Three slots take the graph of four, with an idle row. Then those that were idle go on."""
    ours, theirs = (engines.thinker for engines in both_of_five)
    tokens = [
        assert_prefills_alike(ours, theirs, slot, text_prompt(rows, slot))
        for slot, rows in enumerate((62, 12, 90, 1, 40))
    ]
    last = assert_steps_alike(ours, theirs, order, [tokens[slot] for slot in order], steps=3)
    for slot, token in zip(order, last, strict=True):
        tokens[slot] = token
    after = [3, 1, 0, 4, 2]
    assert_steps_alike(ours, theirs, after, [tokens[slot] for slot in after], steps=1)


@pytest.mark.parametrize("slots", [[1], [0, 1]])
def test_a_step_writes_one_position_of_its_own_slots(both, slots) -> None:
    """One slot takes the graph of one, two the graph of all with an idle row."""
    thinker = both[1].thinker
    lengths = (50, 20, 70)
    for slot, rows in enumerate(lengths):
        thinker.prefill(slot, text_prompt(rows, slot))
    before = cache_of(thinker)
    thinker.step(slots, [5] * len(slots))
    for held, was in zip(cache_of(thinker), before, strict=True):
        changed = (held != was)[:, :, :CONTEXT_LENGTH].any(-1).any(1).nonzero().tolist()
        assert changed == [[slot, lengths[slot]] for slot in slots]


def test_a_cleared_slot_of_nan_serves_as_the_cpus_beside_a_long_one(both) -> None:
    ours, theirs = (engines.thinker for engines in both)
    long = assert_prefills_alike(ours, theirs, 1, text_prompt(200))
    cache: Any = theirs._decoder._graphs.context_encoding_model.model.kv_mgr  # type: ignore[attr-defined]
    with torch.inference_mode():
        for tensor in cache.past_key_values:
            tensor.data[0] = float("nan")
    theirs.clear(0)
    token = assert_prefills_alike(ours, theirs, 0, text_prompt(9))
    assert_steps_alike(ours, theirs, [0, 1], [token, long], steps=2)


def test_what_is_too_long_is_refused_and_moves_nothing(both) -> None:
    ours, theirs = (engines.thinker for engines in both)
    token = assert_prefills_alike(ours, theirs, 0, text_prompt(CONTEXT_LENGTH - 1))
    (token,) = assert_steps_alike(ours, theirs, [0], [token], steps=1)
    with pytest.raises(BucketError, match="KV cache of 256 positions"):
        theirs.step([0], [token])
    with pytest.raises(BucketError, match=r"257 prompt rows, but the longest .* has 256"):
        theirs.prefill(0, text_prompt(CONTEXT_LENGTH + 1))
    token = assert_prefills_alike(ours, theirs, 1, text_prompt(9))
    with pytest.raises(BucketError):
        theirs.step([1, 0], [token, token])
    assert_steps_alike(ours, theirs, [1], [token], steps=2)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_talker_gets_the_hidden_states_of_any_accept_layer(
    both_of, config, prompt_builder, layer
) -> None:
    changed = replace(config, talker=replace(config.talker, accept_hidden_layer=layer))
    ours, theirs = (engines.thinker for engines in both_of(config=changed, max_concurrency=1))
    assert_prefills_alike(ours, theirs, 0, prompt_builder.prompt(CASES["image-and-audio"].messages))


def test_a_thinker_of_one_slot_prefills_and_steps_as_the_cpus(both_of) -> None:
    """No graph of all slots beside that of one."""
    ours, theirs = (engines.thinker for engines in both_of(max_concurrency=1))
    token = assert_prefills_alike(ours, theirs, 0, text_prompt(20))
    assert_steps_alike(ours, theirs, [0], [token], steps=3)


def test_bfloat16_spares_the_frequencies(nxdi, config) -> None:
    """NxDI casts whatever is a parameter or a buffer."""
    from qwen3_omni_neuron.neuron.nxdi.decoder import AxisRotary

    text_config = config.thinker.text
    rotary = AxisRotary(text_config.rope, text_config.head_dim)
    positions = torch.rand(3, 1, 9) * 4000
    expected = rotary(torch.zeros(1), positions)
    rotary._apply(lambda tensor: tensor.to(torch.bfloat16))
    torch.testing.assert_close(rotary(torch.zeros(1), positions), expected, atol=0, rtol=0)


def test_graphs_are_compiled_with_inputs_of_the_kind_they_are_called_with(
    both, prompt_builder, monkeypatch
) -> None:
    """For the graph that each call takes, shapes and types of the example of its bucket."""
    thinker = both[1].thinker
    assert isinstance(thinker, ThinkerEngine)
    graphs: Any = thinker._decoder._graphs
    called = []
    for wrapper in graphs.models:
        forward = wrapper.forward
        monkeypatch.setattr(
            wrapper,
            "forward",
            lambda *inputs, wrapper=wrapper, forward=forward: (
                called.append((wrapper, inputs)) or forward(*inputs)
            ),
        )
    thinker.prefill(0, prompt_builder.prompt(CASES["image-and-audio"].messages))
    thinker.prefill(2, text_prompt(10))
    thinker.step([0], [5])
    thinker.step([2, 0], [5, 6])
    assert [wrapper.tag for wrapper, _ in called] == [
        "context_encoding_model",
        "context_encoding_model",
        "token_generation_model_of_1",
        "token_generation_model",
    ]
    for wrapper, inputs in called:
        bucket = inputs[1].shape[-1]
        example = wrapper.input_generator()[wrapper.neuron_config.buckets.index(bucket)]
        assert [(i.shape, i.dtype) for i in inputs] == [(e.shape, e.dtype) for e in example]


def test_bfloat16_is_as_close_as_its_rounding(both_of, both, prompt_builder) -> None:
    """Each engine rounds elsewhere: 8 bits hold logits of up to 16 to 0.06."""
    prompt = prompt_builder.prompt(CASES["image-and-audio"].messages)
    exact, _ = both[0].thinker.prefill(0, prompt)
    for engines in both_of(dtype="bfloat16", max_concurrency=2):
        logits, accepted = engines.thinker.prefill(0, prompt)
        assert accepted.dtype == torch.bfloat16
        assert (logits.float() - exact).abs().max() < 0.05 * exact.abs().max()
        assert engines.thinker.step([0], [5]).isfinite().all()
