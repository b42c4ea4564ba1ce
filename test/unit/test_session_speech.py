"""Sessions: speech that arrives in pieces, its prompts, and the prefill ahead of its end."""

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.runtime.request import Request
from testing.media_cases import IMAGE, audio, image, text, tone, user, video
from testing.replies import GREEDY, last
from testing.sessions import assert_same_prompt, prompt_of

SHORT = {**GREEDY, "thinker_max_new_tokens": 4, "talker_max_new_tokens": 5}


def loudening(seconds: float, rate: int, seed: int = 0) -> np.ndarray:
    """Noise whose loudest moments come late, from far below the floor that they set."""
    samples = round(seconds * rate)
    noise = np.random.default_rng(seed).standard_normal(samples) * 0.3
    return (noise * 10 ** (np.linspace(-5, 0, samples))).astype(np.float32)


def noise(seconds: float, rate: int, seed: int = 0) -> np.ndarray:
    samples = round(seconds * rate)
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


def pieces(samples: np.ndarray, dice: random.Random) -> Iterator[np.ndarray]:
    """Cut samples into pieces of any length, empty ones and single samples among them."""
    at = 0
    while at < len(samples):
        size = dice.choice((0, 1, 2, 160, 317, 3200, 40_000, 400_000))
        yield samples[at : at + size]
        at += size


@pytest.mark.parametrize("rate", [16000, 8000, 44100, 22050.5])
@pytest.mark.parametrize("channels", [1, 2, 9])
@pytest.mark.parametrize("kind", [np.float32, np.int16])
@pytest.mark.diagonal
def test_a_clip_appended_in_pieces_makes_the_prompt_of_the_whole_clip(
    omni, rate, channels, kind
) -> None:
    """To the bit: samples and features, whatever the pieces, the rate and the channels."""
    dice = random.Random(f"{rate} {channels}")
    samples = np.stack([loudening(3.3, round(rate), seed) for seed in range(channels)], 1)
    if kind is np.int16:
        samples = (samples.clip(-1, 1) * 32767).astype(np.int16)
    samples = samples[:, 0] if channels == 1 else samples
    other_order = np.asfortranarray(samples)  # numpy sums it in another order
    whole = omni.prompt_builder.prompt(
        [user({"type": "audio", "audio": other_order, "sampling_rate": rate})]
    )
    with omni.session() as session:
        for piece in pieces(samples, dice):
            session.append_audio(piece, rate)
        session._end_clip()
        assert_same_prompt(prompt_of(session), whole)
        assert_same_prompt(omni.prompt_builder.prompt(session.messages), whole)


def test_a_clip_appended_sample_by_sample_makes_the_same_prompt(omni) -> None:
    samples = loudening(0.4, 8000)
    whole = omni.prompt_builder.prompt([user({"type": "audio", "audio": (samples, 8000)})])
    with omni.session() as session:
        for index in range(len(samples)):
            session.append_audio(samples[index : index + 1], 8000)
        session._end_clip()
        assert_same_prompt(prompt_of(session), whole)


def test_a_longer_clip_pads_the_clips_before_it_as_in_the_reference(omni) -> None:
    """The reference pads them to it: their last frames, and even their number."""
    for longer in (0, 39, 200, 400, 401, 30_000):
        first, second = tone(1.02)[:16_100], noise(3, 16000)[: 16_100 + longer]
        with omni.session() as session:
            session.append_audio(first, 16000)
            session.append("and")
            alone = prompt_of(session).audio_mel[0]
            session.append_audio(second, 16000)
            session._end_clip()
            both = [user({"type": "audio", "audio": (x, 16000)}) for x in (first, second)]
            clips = omni.prompt_builder.prompt(both).audio_mel
            for mine, other in zip(prompt_of(session).audio_mel, clips, strict=True):
                assert torch.equal(mine, other)
            assert longer < 200 or alone.shape != clips[0].shape or not torch.equal(alone, clips[0])


def capture_ahead(omni: Qwen3Omni, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    prompts: list[Prompt] = []
    prefill_ahead = omni._pipeline.prefill_ahead

    def spy(request: Request) -> Any:
        prompts.append(request.prompt)
        return prefill_ahead(request)

    monkeypatch.setattr(omni._pipeline, "prefill_ahead", spy)
    return prompts


def assert_prefix(early: Prompt, final: Prompt, same_features: bool = True) -> None:
    rows = len(early)
    assert rows <= len(final)
    assert early.token_ids.tolist() == final.token_ids[:rows].tolist()
    assert torch.equal(early.positions, final.positions[:, :rows])
    users = len(early.talker.token_ids)
    assert early.talker.token_ids.tolist() == final.talker.token_ids[:users].tolist()
    assert torch.equal(early.talker.positions[:, :users], final.talker.positions[:, :users])
    visions = early.images + early.videos, final.images + final.videos
    for mine, other in zip(*visions, strict=False):
        assert np.array_equal(mine.pixels, other.pixels)
    for ours, theirs in zip(early.audio_mel, final.audio_mel, strict=False):
        assert ours.shape[1] <= theirs.shape[1]
        if same_features:
            assert torch.equal(ours, theirs[:, : ours.shape[1]])


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_of_arriving_speech_is_a_prefix_of_the_final_one(omni, monkeypatch, seed) -> None:
    """Whatever came before the speech: system, turns, text, images, videos, longer clips."""
    dice = random.Random(seed)
    prompts = capture_ahead(omni, monkeypatch)
    rate = dice.choice((8000, 16000, 44100))
    speech = noise(dice.uniform(8.1, 26), rate, seed)
    speech[:rate] *= 4  # the loudest moment: no later one changes the features
    before = [IMAGE, text("Look."), video(4, 2.0), image(64, 64, 3), audio(27.0)]
    system = dice.choice((None, "Be brief."))
    hm = {"role": "assistant", "content": "Hm."}
    earlier = dice.choice(((), (user(audio(27.5)), hm)))
    with omni.session(system, earlier, **SHORT) as session:
        if earlier or dice.random() < 0.5:
            session.append([*dice.sample(before, dice.randrange(1, 4)), audio(27.2)])
        else:  # the speech itself is the longest clip: nothing before it has any sound
            session.append("Listen.")
        complete = 0
        for piece in pieces(speech, dice):
            session.append_audio(piece, rate)
            complete = session._clip.samples if session._clip else 0
        windows = (complete - 200 - 799 * 160) // (800 * 160) + 1
        assert windows >= 1
        session._end_clip()
        session.append(dice.choice(([IMAGE], "What was it?")))
        final = prompt_of(session)
        assert_same_prompt(omni.prompt_builder.prompt(session.messages), final)
    if prompts[0].token_ids[-1] != omni._config.thinker.audio_token_id:
        assert_prefix(prompts.pop(0), final)  # what came before the speech
    assert 1 <= len(prompts) <= windows
    for prompt in prompts:
        assert prompt.token_ids[-1] == omni._config.thinker.audio_token_id
        assert prompt.audio_mel[-1].shape[1] % 800 == 0
        assert_prefix(prompt, final)
    assert prompts[-1].audio_mel[-1].shape[1] == 800 * windows


def test_later_louder_sound_recomputes_features_and_keeps_kv_rows(omni, monkeypatch) -> None:
    prompts = capture_ahead(omni, monkeypatch)
    speech = loudening(17, 16000)
    with omni.session() as session:
        for start in range(0, len(speech), 3200):
            session.append_audio(speech[start : start + 3200], 16000)
        session._end_clip()
        final = prompt_of(session)
    assert not prompts.pop(0).audio_mel
    # Each block of 2 s is louder than the one before: at 8, 10, 12, 14 and 16 s.
    assert [prompt.audio_mel[0].shape[1] for prompt in prompts] == [800, 800, 800, 800, 1600]
    for early, late in itertools.pairwise([*prompts, final]):
        assert_prefix(early, late, same_features=False)
    assert not torch.equal(prompts[0].audio_mel[0], final.audio_mel[0][:, :800])


def test_nothing_is_computed_ahead_of_a_reply_that_is_not_known_yet(omni, monkeypatch) -> None:
    prompts = capture_ahead(omni, monkeypatch)
    speech = noise(9, 16000)
    with omni.session(**GREEDY) as session:
        session.append("Hello")
        stream = session.respond()
        session.append_audio(speech, 16000)
        assert not prompts
        stream.close()
        session.append_audio(speech[:1], 16000)
        assert len(prompts) == 1
        assert_prefix(
            prompts[0], session._prompt(session._conversation(), session._options, growing=True)
        )


def test_a_prompt_before_the_first_window_ends_before_the_clip(omni) -> None:
    with omni.session("Be brief.") as session:
        session.append([IMAGE, text("And now:")])
        session.append_audio(tone(2.0), 16000)
        early = session._prompt(session._conversation(), session._options, growing=True)
        session.append("?")
        assert_prefix(early, prompt_of(session))
    assert early.audio_mel == ()
    assert len(early.images) == 1


def test_the_prompt_of_a_possible_end_is_computed_ahead(omni) -> None:
    clip = tone(1.0)
    with omni.session("Be brief.", **SHORT) as session:
        session.prepare()
        session.append_audio(clip[:200], 16000)
        session.prepare()  # too short so far
        session.append_audio(clip[200:], 16000)
        session.prepare()
        *_, ahead = session._ahead
        while not ahead.ended:
            threading.Event().wait(0.01)
        timings = last(session.respond()).timings
        assert timings.reused_tokens == timings.prompt_tokens - 1
    for longest in (0, 16_100):  # a longer clip before, to which this one is padded
        with omni.session(**SHORT) as session:
            if longest:
                session.append_audio(noise(2, 16000)[:longest], 16000)
                session.append("and")
            session.append_audio(clip[:16_000], 16000)
            session.prepare()
            session.append_audio(clip[:90], 16000)
            session.append("?")
            assert_same_prompt(prompt_of(session), omni.prompt_builder.prompt(session.messages))
