"""Any conversation becomes a prompt that holds together, or is refused with its place."""

import enum
import json
import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron.errors import (
    InputError,
    MessageError,
    OptionError,
    Qwen3OmniError,
    format_value,
)
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.media_cases import audio, image, text, video
from testing.repeats import examples

WORDS = st.text(max_size=12)
# Any code point, halves of surrogate pairs, NUL, control and bidi characters included.
SURROGATES = st.characters(categories=["Cs"])
ANY_TEXT = st.text(
    st.one_of(st.characters(), SURROGATES, st.sampled_from("\0\x1b\u202e\u2066\ufeff\uffff")),
    max_size=12,
)
SIDES = st.integers(1, 150)


class Markup(str):
    """A str that joins in a way of its own, as markupsafe's does."""

    def __add__(self, other: str) -> str:
        return "broken"

    __radd__ = __add__

    def __str__(self) -> str:
        return "broken"


class Role(str, enum.Enum):
    """Roles as a caller may define them: f"{Role.USER}" is "Role.USER"."""

    USER = "user"


class Rude:
    """An object that raises whatever it is asked."""

    def _no(self, *_: object, **__: object) -> Any:
        raise OSError("no")

    __repr__ = __len__ = __getitem__ = __array__ = __eq__ = __float__ = _no
    __hash__ = object.__hash__
    shape = (2, 4, 4, 3)


class RudeFrames(Rude):
    """One that says how many frames it has, and then gives none."""

    def __len__(self) -> int:
        return 2


def released_view() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


def nested(kind: str) -> Any:
    """Deeper than repr goes."""
    value: Any = []
    for _ in range(5000):
        value = [value] if kind == "list" else {"content": value}
    return value


ODD_VALUES = (
    *(10**400, -(10**400), 10**5000, 2**63, 1e308, 5e-324, float("nan"), float("inf")),
    *(1j, Fraction(10**400), Fraction(1, 10**400), np.timedelta64(1, "s"), np.bool_(True)),
    *(np.int8(3), np.float16(2), np.complex64(1), np.longdouble(3), np.void(b"abc")),
    *(np.str_("\ud800"), np.bytes_(b"a"), Markup("a"), Role.USER, Rude(), RudeFrames(), [Rude()]),
    *(b"", bytearray(b"hi"), memoryview(b"hi"), released_view(), range(3), {1: 2}, {None: None}),
    *(memoryview(np.zeros((3, 4, 3), np.float32)), nested("list"), nested("dict")),
    *(np.array([None, 1], object), np.array(["a"]), np.array(None, object), np.zeros(3, "M8[s]")),
    *(np.zeros((9, 9, 3), complex), np.zeros((9, 9, 3), bool), np.zeros(5, [("a", "i4")])),
    *(np.full((9, 9, 3), np.nan), np.full(900, np.inf), np.zeros((900, 0)), np.zeros((0, 4, 4, 3))),
    *(torch.zeros(9, 9, 3, device="meta"), torch.zeros(9, dtype=torch.complex64)),
    *(Path("/"), "/dev/zero", "/nonexistent", Path("a\0b"), "/\udc80", "x" * 5000),
)
# By index: hypothesis would hash and print what it samples from.
ODD = st.integers(0, len(ODD_VALUES) - 1).map(lambda index: ODD_VALUES[index])
PLAIN_JUNK = st.one_of(
    ODD,
    ANY_TEXT,
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    WORDS,
    st.binary(max_size=40),
    st.lists(st.integers(0, 255), max_size=4),
    st.dictionaries(st.one_of(ANY_TEXT, st.integers(), st.none()), st.integers(), max_size=2),
    st.builds(np.zeros, st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)),
    st.just(np.array([np.nan, 1.0])),
)
JUNK = st.one_of(PLAIN_JUNK, st.lists(PLAIN_JUNK, max_size=2), st.tuples(PLAIN_JUNK, PLAIN_JUNK))
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


def assert_whole(prompt: Prompt, config: OmniConfig) -> None:
    """Check that there is a placeholder for every media row, and a position for every token."""
    c, ids = config.thinker, prompt.token_ids
    merge = c.vision.merge_size**2
    made = {
        c.audio_token_id: sum(c.audio.tokens(m.shape[1]) for m in prompt.audio_mel),
        c.image_token_id: sum(math.prod(v.grid) // merge for v in prompt.images),
        c.video_token_id: sum(math.prod(v.grid) // merge for v in prompt.videos),
    }
    assert {token: int((ids == token).sum()) for token in made} == made
    assert prompt.positions.shape == (3, len(ids))
    assert len(prompt.talker) == len(prompt.talker.token_ids) + 9
    for positions in (prompt.positions, prompt.talker.positions):
        assert torch.isfinite(positions).all()
        assert (positions >= 0).all()


def assert_sayable(error: Qwen3OmniError) -> None:
    """Check that an error's message can be printed and stored, and is short."""
    text = str(error)
    assert text.encode("utf-8")
    assert len(text) < 1500


@settings(max_examples=60, **LIMITS)
@given(st.lists(GOOD, min_size=1, max_size=4), st.booleans())
def test_a_good_conversation_becomes_a_prompt(
    prompt_builder, config, messages, hear_videos
) -> None:
    messages = [*messages, {"role": "user", "content": "And?"}]
    assert_whole(prompt_builder.prompt(messages, hear_videos), config)


@settings(max_examples=examples(300), **LIMITS)
@given(st.one_of(JUNK, st.lists(st.one_of(GOOD, BAD, JUNK), max_size=3)), st.booleans())
def test_a_bad_conversation_is_refused_or_understood(
    prompt_builder, config, messages, hear_videos
) -> None:
    try:
        prompt = prompt_builder.prompt(messages, hear_videos, most_tokens=2000)
    except InputError as error:
        assert_sayable(error)
        return
    assert_whole(prompt, config)


def at_every_place(value: Any) -> Iterator[tuple[str, Any]]:
    """Conversations that hold the value, by the place where they do."""
    clip, frames = audio(0.1), video(2, 2.0, 0.1)
    rate = {"sampling_rate": 16000}
    yield "messages", value
    yield "message", [value]
    yield "role", [{"role": value, "content": "x"}, {"role": "user", "content": "x"}]
    yield "content", [{"role": "user", "content": value}]
    yield "assistant", [{"role": "assistant", "content": value}, {"role": "user", "content": "x"}]
    for place, item in {
        "item": value,
        "type": {"type": value},
        "text": {"type": "text", "text": value},
        "key": {"type": "text", "text": "x", format_value(value): value},
        "audio": {"type": "audio", "audio": value},
        "audio with a rate": {"type": "audio", "audio": value, **rate},
        "a block of arriving sound": {"type": "audio", "audio": iter([value]), **rate},
        "rate": {**clip, "sampling_rate": value},
        "rate beside an array": {"type": "audio", "audio": (clip["audio"], value)},
        "image": {"type": "image", "image": value},
        "min_pixels": {**image(32, 32), "min_pixels": value},
        "max_pixels": {**image(32, 32), "max_pixels": value},
        "video": {"type": "video", "video": value, "fps": 2.0},
        "frame": {"type": "video", "video": [value], "fps": 2.0},
        "fps": {**frames, "fps": value},
        "min_pixels of a video": {**frames, "min_pixels": value},
        "max_pixels of a video": {**frames, "max_pixels": value},
        "sound of a video": {**frames, "audio": value},
    }.items():
        yield place, [{"role": "user", "content": [item]}]


@pytest.mark.parametrize("index", range(len(ODD_VALUES)))
def test_an_odd_value_at_any_place_gives_a_prompt_or_an_error_of_ours(
    prompt_builder, config, index
) -> None:
    value = ODD_VALUES[index]
    for place, messages in at_every_place(value):
        try:
            prompt = prompt_builder.prompt(messages, True, most_tokens=2000)
        except InputError as error:
            assert_sayable(error)
        except Exception as error:
            raise AssertionError(f"{format_value(value)} as {place}") from error
        else:
            assert_whole(prompt, config)


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_paths_that_are_no_files(prompt_builder, tmp_path, kind) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = (".", "pipe", "empty", "loop", "absent", "a\0b", "\ud800", "\x1b[31m\u202e", "x" * 999)
    for name in names:
        for path in (tmp_path / name, str(tmp_path / name)):
            item = {"type": kind, kind: path}
            with pytest.raises(InputError, match=r"messages\[0\]\.content\[0\]") as caught:
                prompt_builder.prompt([{"role": "user", "content": [item]}], True)
            assert_sayable(caught.value)
            assert str(caught.value).isprintable()


def test_half_of_a_surrogate_pair_is_refused_with_its_place(prompt_builder) -> None:
    first = {"role": "user", "content": "Hello"}
    reply = json.loads(r'{"role": "assistant", "content": "Hi \udfff."}')
    with pytest.raises(
        MessageError, match=r"messages\[1\] \(assistant\) has U\+DFFF at character 3 of its 5"
    ):
        prompt_builder.prompt([first, reply])
    item = json.loads(r'{"type": "text", "text": "\ud800 hi"}')
    with pytest.raises(
        MessageError, match=r"messages\[0\]\.content\[1\] \(user\) has U\+D800 at character 0 of"
    ):
        prompt_builder.prompt([{"role": "user", "content": [text("x"), item]}])
    whole = json.loads(r'"\ud83d\ude00"')  # a pair is one character, once it is read
    prompt_builder.prompt([{"role": "user", "content": whole}])


def test_subclasses_of_str_are_the_text_that_they_hold(prompt_builder) -> None:
    plain = prompt_builder.prompt([{"role": "user", "content": "Hello"}])
    for role, content in ((Role.USER, Markup("Hello")), (np.str_("user"), np.str_("Hello"))):
        prompt = prompt_builder.prompt([{"role": role, "content": content}])
        assert torch.equal(prompt.token_ids, plain.token_ids)


OPTIONS = tuple(RequestOptions.__dataclass_fields__)


@settings(max_examples=examples(300), **LIMITS)
@given(st.one_of(st.sampled_from(OPTIONS), ANY_TEXT), PLAIN_JUNK)
def test_any_option_is_taken_or_refused(config, name, value) -> None:
    try:
        options = RequestOptions.parse({name: value})
        assert options.speaker_id(config) >= 0
        assert options.eos_ids(config)
    except OptionError as error:
        assert_sayable(error)


@settings(max_examples=15, **LIMITS)
@given(st.lists(GOOD, min_size=1, max_size=3), st.booleans())
def test_a_good_conversation_is_answered(omni, messages, hear_videos) -> None:
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
