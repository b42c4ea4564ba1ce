"""Whole replies against the reference: token for token, code for code, sample for sample."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cpu.native.talker import NativeTalker
from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.events import AudioChunk, Finished, TextDelta
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import IMAGE, QUESTION_WAV, audio, text, user
from testing.prompts import prompt_of
from testing.repeats import again
from testing.replies import GREEDY, assert_alike, assert_same, reply_to_the_limit
from testing.rounded_checkpoint import write_rounded_checkpoint
from testing.tiny import write_tiny_checkpoint

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")
TEXT = [{"role": "user", "content": "What colour is the sky?"}]
SPOKEN = [{"role": "user", "content": [{"type": "audio", "audio": str(QUESTION_WAV)}]}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
EARLIER = [
    {"role": "user", "content": "Hello, who are you?"},
    {"role": "assistant", "content": "A model."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Listen to this and to that:"},
            {"type": "audio", "audio": str(QUESTION_WAV)},
            {"type": "audio", "audio": (np.sin(np.arange(30000) / 7), 22050)},
            {"type": "text", "text": "Which is louder?"},
        ],
    },
    {"role": "assistant", "content": "The first."},
    {"role": "user", "content": "Are you sure?"},
]


@torch.no_grad()
def test_log_probabilities_are_by_the_references_logits(both_of_seed) -> None:
    """Whatever they are sampled with; every event has those of its tokens."""
    omni, reference = both_of_seed(1)
    options: Any = {"thinker_do_sample": True, "thinker_temperature": 3.0, "thinker_top_k": 20}
    options |= {"thinker_max_new_tokens": 12, "seed": 4}
    asked: Any = {"logprobs": True, "top_logprobs": 3}
    *deltas, end = omni.stream_text(SYSTEM + TEXT, **asked, **options)
    assert isinstance(end, Finished)
    prompt, made = omni.prompt_builder.prompt(SYSTEM + TEXT), torch.tensor(end.result.token_ids)
    ids = torch.cat((prompt.token_ids, made))[None]
    logits = reference.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    by_id = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = by_id[torch.arange(len(made)), made]
    torch.testing.assert_close(torch.tensor(end.result.logprobs), expected, atol=1e-4, rtol=0)
    likeliest = by_id.topk(3)
    given = end.result.top_logprobs
    assert [[token_id for token_id, _ in each] for each in given] == likeliest.indices.tolist()
    numbers = torch.tensor([[logprob for _, logprob in each] for each in given])
    torch.testing.assert_close(numbers, likeliest.values, atol=1e-4, rtol=0)
    told = [x for event in deltas if isinstance(event, TextDelta) for x in event.logprobs]
    assert told == end.result.logprobs
    assert [x for e in deltas if isinstance(e, TextDelta) for x in e.top_logprobs] == given
    assert omni.generate_text(SYSTEM + TEXT, **options).logprobs == []


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "messages",
    [TEXT, SYSTEM + TEXT, SPOKEN, SYSTEM + SPOKEN, SYSTEM + EARLIER],
    ids=["text", "system", "audio", "system-audio", "earlier-turns"],
)
@pytest.mark.diagonal
def test_a_reply_cut_by_its_limits_is_the_references(both_of_seed, seed, messages) -> None:
    omni, reference = both_of_seed(seed)
    ours, theirs = reply_to_the_limit(omni, reference, messages, tokens=6, talker_max_new_tokens=12)
    assert_same(ours, theirs, reference)
    assert len(ours.codes) == 11
    assert ours.thinker_finish_reason == ours.talker_finish_reason == "length"


def test_every_speaker_is_the_references(omni, reference) -> None:
    for speaker in ("Chelsie", "ethan", "AIDEN"):
        ours, theirs = reply_to_the_limit(
            omni, reference, TEXT, tokens=4, talker_max_new_tokens=8, speaker=speaker
        )
        assert_same(ours, theirs, reference)


def ending_at(omni: Qwen3Omni, messages: Any, tokens: int) -> int:
    """The token that the greedy reply has at `tokens`, and nowhere before: call it EOS."""
    written = omni.generate_text(messages, thinker_max_new_tokens=tokens + 1, **GREEDY).token_ids
    assert written[tokens] not in written[:tokens], "choose another question for this test"
    return written[tokens]


def test_a_reply_that_ends_by_eos_is_the_references(omni, reference) -> None:
    for tokens in (1, 2, 3, 7):
        eos = ending_at(omni, TEXT, tokens)
        options = {"thinker_eos_token_id": eos, "talker_max_new_tokens": tokens + 8}
        ours = omni.generate_audio(TEXT, **GREEDY, **options)
        theirs = reference.generate(
            omni.prompt_builder.prompt(TEXT), thinker_max_new_tokens=50, **options
        )
        assert ours.token_ids == theirs.token_ids
        assert ours.token_ids[-1] == eos
        assert ours.thinker_finish_reason == "stop"
        assert_same(ours, theirs, reference)


@pytest.mark.parametrize(
    "options",
    [{"thinker_repetition_penalty": 3.0}, {"thinker_min_new_tokens": 6}],
    ids=["penalty", "min_tokens"],
)
def test_penalty_and_least_length_are_the_references(omni, reference, options) -> None:
    eos = ending_at(omni, TEXT, 3)
    options = {**options, "thinker_eos_token_id": eos, "talker_max_new_tokens": 4}
    ours = omni.generate_audio(TEXT, thinker_max_new_tokens=12, **GREEDY, **options)
    theirs = reference.generate(
        omni.prompt_builder.prompt(TEXT), thinker_max_new_tokens=12, **options
    )
    assert ours.token_ids == theirs.token_ids
    free = omni.generate_text(TEXT, thinker_max_new_tokens=12, **GREEDY).token_ids
    assert ours.token_ids != free[: len(ours.token_ids)], "choose another value for this test"


def test_a_reply_of_eos_alone_is_silence(omni) -> None:
    eos = ending_at(omni, TEXT, 0)
    result = omni.generate_audio(TEXT, thinker_eos_token_id=[eos], **GREEDY)
    assert result.token_ids == [eos]
    assert result.talker_finish_reason == "no_speech"
    assert result.audio.shape == (0,)
    assert result.audio.dtype == np.float32
    assert result.codes.shape == (0, 16)
    assert result.timings.ttfb_s is None


def with_codec_eos(folder: Path, code: int, into: Path) -> Path:
    """A copy of the checkpoint in which `code` ends speech."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    raw = json.loads((into / "config.json").read_text())
    raw["talker_config"]["codec_eos_token_id"] = code
    (into / "config.json").write_text(json.dumps(raw))
    return into


def test_speech_that_ends_by_codec_eos_is_the_references(omni, checkpoint, tmp_path) -> None:
    limits = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 30}
    code0 = omni.generate_audio(TEXT, **GREEDY, **limits).codes[:, 0].tolist()
    frames = next(i for i in range(3, 20) if code0[i] not in code0[:i])
    folder = with_codec_eos(checkpoint, code0[frames], tmp_path)
    reference = Reference(folder)
    with Qwen3Omni.load(folder, dtype="float32", max_concurrency=1) as other:
        ours, theirs = reply_to_the_limit(
            other, reference, TEXT, tokens=5, talker_max_new_tokens=30
        )
    assert_same(ours, theirs, reference)
    assert len(ours.codes) == frames
    assert ours.talker_finish_reason == "stop"


@pytest.mark.parametrize(
    "messages", [SYSTEM + TEXT, SYSTEM + EARLIER], ids=["text", "earlier-turns-and-clips"]
)
def test_every_talker_row_is_the_references(bare, reference, monkeypatch, messages) -> None:
    """Prompt rows and decode rows: text row k at step k, tts_eos once, then tts_pad.

    A prompt without media goes in before the thinker has answered, and its last row as a step."""
    talker = bare._pipeline._engines.talker
    rows: list[torch.Tensor] = []
    fill, step = talker._fill, talker._decoder.step

    def spy_fill(slot: int, prompt_rows: torch.Tensor, *rest: Any) -> Any:
        rows.append(prompt_rows)
        return fill(slot, prompt_rows, *rest)

    def spy_step(slots: Any, row: torch.Tensor) -> Any:
        rows.append(row)
        return step(slots, row)

    def spy_step_ids(slots: Any, ids: Any, table: Any, added: torch.Tensor, hidden: Any) -> Any:
        rows.append(talker.text_rows(torch.tensor(ids)) + added[list(slots)])
        return step_ids(slots, ids, table, added, hidden)

    def spy_prefill_ids(
        slot: int, ids: Any, positions: Any, start: int, table: Any, after: torch.Tensor, wants: Any
    ) -> Any:
        rows.extend((talker.text_rows(torch.from_numpy(ids)), after))
        return prefill_ids(slot, ids, positions, start, table, after, wants)

    monkeypatch.setattr(talker, "_fill", spy_fill)
    if isinstance(talker, NativeTalker):  # the C looks up their text, and adds the feedback
        step_ids, prefill_ids = talker._slots.step_ids, talker._slots.prefill_ids
        monkeypatch.setattr(talker._slots, "step_ids", spy_step_ids)
        monkeypatch.setattr(talker._slots, "prefill_ids", spy_prefill_ids)
    else:
        monkeypatch.setattr(talker._decoder, "step", spy_step)
    _, theirs = reply_to_the_limit(bare, reference, messages, tokens=4, talker_max_new_tokens=10)
    talked = [call["inputs_embeds"][0] for call in theirs.talker_calls]
    ours, expected = torch.cat(rows), torch.cat(talked)
    # 4 tokens: 3 text rows, tts_eos, then tts_pad.
    prompt = len(talked[0])
    assert len(ours) == prompt + 9
    for number, row in enumerate(ours):
        where = f"prompt row {number}" if number < prompt else f"decode row {number - prompt}"
        assert torch.allclose(row, expected[number], atol=1e-5), f"{where} differs"


def test_a_seed_fixes_everything_and_another_seed_changes_it(omni) -> None:
    # Chunk sizes that follow the pace of the frames would round the samples otherwise each time.
    options = {"thinker_max_new_tokens": 8, "talker_max_new_tokens": 8, "chunk_frames": [4]}
    first, again, other = (omni.generate_audio(TEXT, seed=seed, **options) for seed in (5, 5, 6))
    assert_alike(first, again, atol=0)
    assert first.token_ids != other.token_ids
    assert first.codes.tolist() != other.codes.tolist()


def test_generate_audio_is_the_collected_stream(omni) -> None:
    limits = {"thinker_max_new_tokens": 9, "talker_max_new_tokens": 6}
    options = {"seed": 3, "chunk_frames": [4], **limits}
    events = list(omni.stream(TEXT, **options))
    result = omni.generate_audio(TEXT, **options)
    assert isinstance(events[-1], Finished)
    deltas = [e for e in events if isinstance(e, TextDelta)]
    assert "".join(d.text for d in deltas) == result.text
    assert [i for d in deltas for i in d.token_ids] == result.token_ids
    chunks = [e for e in events if isinstance(e, AudioChunk)]
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), result.audio)
    assert sum(c.frames for c in chunks) == len(result.codes)
    ours, collected = (dataclasses.replace(r, timings=None) for r in (events[-1].result, result))
    assert ours.token_ids == collected.token_ids


AUTO_TOKENS = 10


@pytest.mark.parametrize("seed", [1, again(2)])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_weights_in_bfloat16_answer_as_the_reference_in_float32(
    both_of_seed, checkpoint_of_seed, seed, dtype
) -> None:
    """The tiny checkpoint is in bfloat16: the reference widens it, `auto` computes as if it had.
    int8 rounds the weights of the decoders: it speaks, and is not held to the reference."""
    _, reference = both_of_seed(seed)
    picture = [user(text("See"), IMAGE, audio(1.2), text("and tell."))]
    with Qwen3Omni.load(checkpoint_of_seed(seed), dtype=dtype, max_concurrency=1) as omni:
        for messages in (TEXT, SPOKEN, SYSTEM + EARLIER, picture):
            options: dict[str, Any] = {"talker_max_new_tokens": 16}
            if dtype == "int8":
                ours = omni.generate_audio(
                    messages, thinker_max_new_tokens=AUTO_TOKENS, **GREEDY, **options
                )
                assert len(ours.codes) == 15
                continue
            ours, theirs = reply_to_the_limit(omni, reference, messages, AUTO_TOKENS, **options)
            # 4.57 hands out hidden states that deepstack was added to: see test_media.
            if TRANSFORMERS_5 or messages is not picture:
                assert_same(ours, theirs, reference)
            assert len(ours.codes) == 15


@pytest.mark.parametrize("predictor_dtype", ["mixed", "same"])
def test_int4_answers_as_the_reference_over_its_weights(
    checkpoint_of_seed, tmp_path, predictor_dtype
) -> None:
    """In float32, over a checkpoint whose matrices are rounded as int4 rounds them."""
    folder = checkpoint_of_seed(2)
    numbers: dict[str, Any] = {"dtype": "int4", "predictor_dtype": predictor_dtype}
    reference = Reference(write_rounded_checkpoint(folder, tmp_path / "rounded", predictor_dtype))
    with Qwen3Omni.load(folder, max_concurrency=1, **numbers) as omni:
        for messages in (TEXT, SPOKEN, SYSTEM + EARLIER):
            ours, theirs = reply_to_the_limit(
                omni, reference, messages, AUTO_TOKENS, talker_max_new_tokens=16
            )
            if predictor_dtype == "mixed":
                assert_same(ours, theirs, reference)
            else:  # a later code of random weights hangs on the predictor's rounded inputs
                assert ours.codes[:4].tolist() == theirs.codes[:4].tolist()
            assert len(ours.codes) == 15


def test_mixed_rounds_a_float32_checkpoint_to_bfloat16(omni, tmp_path) -> None:
    """Asked for by name: `auto` takes float32 for it. Its reply is the rounded checkpoint's."""
    wide = write_tiny_checkpoint(tmp_path / "wide", seed=1, dtype="float32")
    limits: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8, **GREEDY}
    replies = {}
    for dtype in ("auto", "float32", "mixed"):
        with Qwen3Omni.load(wide, dtype=dtype, max_concurrency=1) as other:
            replies[dtype] = other.generate_audio(TEXT, **limits)
    assert replies["auto"].codes.tolist() == replies["float32"].codes.tolist()
    rounded = omni.generate_audio(TEXT, **limits)  # of the same seed, stored in bfloat16
    assert replies["mixed"].token_ids == rounded.token_ids
    assert replies["mixed"].codes.tolist() == rounded.codes.tolist()


@pytest.mark.parametrize("room", [0, 1])
def test_a_talker_prompt_that_leaves_no_position_for_a_frame_is_refused(
    bare, config, monkeypatch, room
) -> None:
    talker = bare._pipeline._engines.talker
    ids = torch.tensor([config.im_start_id, config.user_id, 7, 8])
    prompt = prompt_of(ids).talker
    monkeypatch.setattr(talker, "context_length", len(ids) + 9 + room)
    if room:
        talker.prepare(0, prompt, 5)
        return
    with pytest.raises(PromptTooLongError, match="13 rows, but its KV cache has 13 positions"):
        talker.prepare(0, prompt, 5)


def test_a_slot_forgets_a_prompt_that_was_given_up(bare, config) -> None:
    """Closed between `prepare` and `prefill`, when its clip was still awaited."""
    talker = bare._pipeline._engines.talker
    user = [config.im_start_id, config.user_id]
    logits = []
    for given_up in ([], [[*user, config.thinker.audio_token_id, 7]]):
        for token_ids in [*given_up, [*user, 8, 11]]:
            talker.prepare(0, prompt_of(torch.tensor(token_ids)).talker, 5)
        logits.append(talker.prefill(0, torch.zeros(0, config.thinker.text.hidden_size), 9))
    torch.testing.assert_close(logits[0], logits[1])
