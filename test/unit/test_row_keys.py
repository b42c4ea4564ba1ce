"""Keys of a prompt's rows: equal where the KV cache's rows are, and nowhere else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron.prompt.prompt import HEAD_ROWS, PromptKeys, RowKeys, prompt_keys
from testing.media_cases import RATE, image, text, tone, user, video
from testing.repeats import examples

Item = dict[str, Any]
Rows = list[tuple[int, int, int]]  # of each: token id, step from the last position, source
REPLY = {"role": "assistant", "content": "Yes."}
MEDIA = 2
ROWS = st.lists(
    st.tuples(st.sampled_from((0, 1, MEDIA)), st.integers(1, 2), st.integers(0, 1)), max_size=9
)


@pytest.fixture
def keys_of(omni, config) -> Any:
    def keys(*messages: Any, **options: Any) -> PromptKeys:
        return prompt_keys(omni.prompt_builder.prompt(list(messages), **options), config)

    return keys


def noise(seconds: float) -> np.ndarray:
    samples = np.random.default_rng(0).normal(size=round(seconds * RATE))
    return (0.01 * samples).astype(np.float32)


def clip(samples: np.ndarray) -> Item:
    return {"type": "audio", "audio": samples, "sampling_rate": RATE}


def made_keys(rows: Rows) -> tuple[RowKeys, list[tuple[int, ...]]]:
    """Return keys, and the same row by row. Before all media, positions are indices of rows."""
    ids = np.array([row[0] for row in rows], np.int64)
    (media,) = (ids == MEDIA).nonzero()
    first = min(media, default=len(rows))
    steps = [1 if index < first else row[1] for index, row in enumerate(rows)]
    positions = (np.cumsum(steps) - 1).astype(np.float32)
    sources = np.array([[rows[index][2] for index in media]], np.int32)
    keys = RowKeys(ids, np.tile(positions, (3, 1)), media, sources)
    made_of = [row[2] if row[0] == MEDIA else -1 for row in rows]
    return keys, list(zip(ids.tolist(), positions.tolist(), made_of, strict=True))


@settings(max_examples=examples(400))
@given(st.integers(0, HEAD_ROWS + 1), ROWS, ROWS, st.one_of(st.just([]), ROWS))
def test_shared_rows_are_counted_as_one_by_one(text_rows, common, one, other) -> None:
    begin: Rows = [(0, 1, 0)] * text_rows + common
    first, rows = made_keys(begin + one)
    second, others = made_keys(begin + other)
    differs = [a != b for a, b in zip(rows, others, strict=False)]
    expected = differs.index(True) if True in differs else len(differs)
    assert first.shared(second) == second.shared(first) == expected


def test_a_later_turn_begins_with_the_earlier_ones_rows(keys_of) -> None:
    first = user(text("Look:"), image(64, 64), clip(tone(2.0)), video(4, 2.0, 2.0))
    one = keys_of(first, use_audio_in_video=True)
    two = keys_of(first, REPLY, user(text("And now?")), use_audio_in_video=True)
    assert two.thinker.shared(one.thinker) == len(one.thinker)
    assert two.talker.shared(one.talker) == len(one.talker)


@pytest.mark.parametrize(
    ("one", "other", "token"),
    [
        (image(64, 64, seed=1), image(64, 64, seed=2), "image_token_id"),
        (clip(tone(2.0)), clip(tone(2.0, 310.0)), "audio_token_id"),
        (video(4, 2.0), {**video(4, 2.0), "video": video(4, 2.0, size=96)["video"][:, :, 32:]},
         "video_token_id"),
    ],
    ids=["image", "audio", "video"],
)  # fmt: skip
def test_other_media_of_one_size_have_other_keys_from_their_first_row_on(
    keys_of, config, one, other, token
) -> None:
    after = text("What is it? " * 9)
    first, second = (keys_of(user(text("Look:"), media, after)) for media in (one, other))
    assert len(first.thinker) == len(second.thinker)
    shared = first.thinker.shared(second.thinker)
    assert first.thinker.token_ids[shared] == getattr(config.thinker, token)
    assert shared == first.thinker.media[0]
    assert first.talker.shared(second.talker) == first.talker.media[0]


def test_a_clip_that_grows_keeps_the_keys_of_its_whole_windows(keys_of, config) -> None:
    samples = noise(20.0)  # of less than 80 dB: no later peak changes an earlier feature
    window = config.thinker.audio.window_tokens
    short, long = keys_of(user(clip(samples[: 17 * RATE]))), keys_of(user(clip(samples)))
    assert short.thinker.shared(long.thinker) == short.thinker.media[0] + 2 * window


def test_the_talkers_media_depend_on_what_only_the_thinker_reads(keys_of) -> None:
    """Its rows are hidden states of the thinker, which has read the system prompt before."""
    messages = [user(text("Listen."), clip(tone(1.5)), text("Well?"))]
    brief = keys_of({"role": "system", "content": "Be brief."}, *messages)
    long = keys_of({"role": "system", "content": "Be wordy."}, *messages)
    assert len(brief.talker) == len(long.talker)
    assert brief.talker.shared(long.talker) == brief.talker.media[0]
    other = keys_of({"role": "system", "content": "Be brief!"}, *messages)
    assert len(brief.thinker) == len(other.thinker)
    assert brief.talker.shared(other.talker) == brief.talker.media[0]
    spoken = {"role": "assistant", "content": "No."}
    first = keys_of(user(text("Hi")), REPLY, *messages)
    second = keys_of(user(text("Hi")), spoken, *messages)
    assert first.talker.shared(second.talker) == first.talker.media[0]


def test_the_talkers_media_depend_on_their_places_in_the_thinker(keys_of) -> None:
    """Its own positions are those of text, where a video has audio."""
    one, other = (
        keys_of(user(video(4, fps, 1.0)), use_audio_in_video=True) for fps in (2.0, 2.001)
    )
    assert np.array_equal(one.thinker.token_ids, other.thinker.token_ids)
    assert np.array_equal(one.talker.positions, other.talker.positions)
    frames = (
        one.thinker.positions[0, one.thinker.media] != other.thinker.positions[0, one.thinker.media]
    )
    assert one.talker.shared(other.talker) == one.talker.media[frames.argmax()]


def test_a_replys_rows_have_the_keys_that_the_next_prompt_gives_them(keys_of, omni) -> None:
    first = user(text("Hello"), clip(tone(1.2)))
    prompt = omni.prompt_builder.prompt([first])
    ids = omni.prompt_builder.prompt([first, REPLY, user(text("And?"))]).token_ids
    held = keys_of(first).thinker.followed_by(ids[len(prompt) : len(prompt) + 2].tolist())
    after = keys_of(first, REPLY, user(text("And?"))).thinker
    assert after.shared(held) == len(held) == len(prompt) + 2
    assert torch.equal(ids[: len(held)], torch.from_numpy(held.token_ids))
