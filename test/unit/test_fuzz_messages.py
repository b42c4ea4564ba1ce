"""Any conversation becomes a prompt that holds together, or is refused with its place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.conversation.prompt import Prompt
from qwen3_omni_neuron.conversation.template import Conversation
from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.model.config import OmniConfig
from testing.media_cases import audio, image, text, video

WORDS = st.text(max_size=12)
SIDES = st.integers(1, 150)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    WORDS,
    st.binary(max_size=40),
    st.lists(st.integers(0, 255), max_size=4),
    st.dictionaries(WORDS, st.integers(), max_size=2),
    st.builds(np.zeros, st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)),
    st.just(np.array([np.nan, 1.0])),
)
GOOD_ITEMS = st.one_of(
    st.builds(text, WORDS),
    st.builds(image, SIDES, SIDES, st.integers(0, 9)),
    st.builds(audio, st.floats(0.03, 1.2)),
    st.builds(
        video,
        st.integers(1, 5),
        st.floats(0.3, 30),
        st.one_of(st.none(), st.floats(0.03, 1.0)),
        st.integers(1, 80),
    ),
)
KINDS = st.sampled_from(("audio", "image", "video", "text", "smell"))
KEYS = st.sampled_from(("fps", "sampling_rate", "min_pixels", "max_pixels", "max_frames", "type"))
BAD_ITEMS = st.one_of(
    JUNK,
    st.builds(lambda kind, value: {"type": kind, kind: value}, KINDS, JUNK),
    st.builds(lambda item, key, value: {**item, key: value}, GOOD_ITEMS, KEYS | KINDS, JUNK),
)
ROLES = st.sampled_from(("system", "user", "assistant"))
BARE = st.builds(lambda role, words: {"role": role, "content": words}, ROLES, WORDS)
GOOD = st.one_of(
    BARE,
    st.builds(lambda items: {"role": "user", "content": items}, st.lists(GOOD_ITEMS, max_size=4)),
)
BAD = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.one_of(ROLES, JUNK),
    st.one_of(JUNK, st.lists(st.one_of(GOOD_ITEMS, BAD_ITEMS), max_size=3)),
)
LIMITS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def conversation(checkpoint: Path, config: OmniConfig) -> Conversation:
    return Conversation(checkpoint, config)


def assert_whole(prompt: Prompt, config: OmniConfig) -> None:
    """As many placeholders as rows will be made, and positions for all of it."""
    c, ids = config.thinker, prompt.token_ids
    merge = c.vision.merge_size**2
    made = {
        c.audio_token_id: sum(c.audio.tokens(m.shape[1]) for m in prompt.audio_mel),
        c.image_token_id: sum(len(p.values) // merge for p in prompt.images),
        c.video_token_id: sum(len(p.values) // merge for p in prompt.videos),
    }
    assert {token: int((ids == token).sum()) for token in made} == made
    assert prompt.positions.shape == (3, len(ids))
    assert len(prompt.talker) == len(prompt.talker.token_ids) + 9
    for positions in (prompt.positions, prompt.talker.positions):
        assert torch.isfinite(positions).all()
        assert (positions >= 0).all()


@settings(max_examples=60, **LIMITS)
@given(st.lists(GOOD, min_size=1, max_size=4), st.booleans())
def test_a_good_conversation_becomes_a_prompt(
    conversation: Conversation, config: OmniConfig, messages: list[Any], hear_videos: bool
) -> None:
    messages = [*messages, {"role": "user", "content": "And?"}]
    assert_whole(conversation.prompt(messages, hear_videos), config)


@settings(max_examples=150, **LIMITS)
@given(st.one_of(JUNK, st.lists(st.one_of(GOOD, BAD, JUNK), max_size=3)), st.booleans())
def test_a_bad_conversation_is_refused_or_understood(
    conversation: Conversation, config: OmniConfig, messages: Any, hear_videos: bool
) -> None:
    try:
        prompt = conversation.prompt(messages, hear_videos, most_tokens=2000)
    except InputError as error:
        assert str(error)
        return
    assert_whole(prompt, config)


@settings(max_examples=15, **LIMITS)
@given(st.lists(GOOD, min_size=1, max_size=3), st.booleans())
def test_a_good_conversation_is_answered(
    omni: Qwen3Omni, messages: list[Any], hear_videos: bool
) -> None:
    messages = [*messages, {"role": "user", "content": "And?"}]
    result = omni.generate_audio(
        messages,
        use_audio_in_video=hear_videos,
        thinker_max_new_tokens=2,
        talker_max_new_tokens=3,
        talker_do_sample=False,
    )
    assert np.isfinite(result.audio).all()
    assert result.thinker_finish_reason in ("stop", "length")
