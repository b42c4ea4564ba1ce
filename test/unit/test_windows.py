"""Windows of sound: cut at pauses, without silence, with times of the sound; the same in pieces."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen3_omni_neuron.prompt.media.windows import GrowingWindows, Window
from train.espeak import VOICES, speak
from train.speech import pink_noise

RATE = 16000
Samples = NDArray[np.float32]


def cut(samples: Samples, longest_s: float = 8.0, timed: bool = True) -> list[Window]:
    growing = GrowingWindows(longest_s, timed)
    found = growing.push(samples) + growing.finish()
    assert (growing.length, growing.held) == (len(samples), 0)
    return found


def noise(seconds: float, db: float = -10.0) -> Samples:
    """Steady noise of a loudness in dB of full scale."""
    made = np.random.default_rng(3).standard_normal(round(RATE * seconds))
    return (made * 10 ** (db / 20)).astype(np.float32)


def syllables(seconds: float, db: float) -> Samples:
    """Noise that is loud and 20 dB softer in turn, as speech is, and that begins loud."""
    made = noise(seconds, db)
    made *= 0.1 + 0.9 * np.abs(np.cos(np.arange(len(made), dtype=np.float32) * (7 / RATE)))
    return made


def silence(seconds: float) -> Samples:
    return np.zeros(round(RATE * seconds), np.float32)


def times(windows: list[Window]) -> list[tuple[float, float]]:
    return [(round(w.start_s, 3), round(w.end_s, 3)) for w in windows]


def starts(windows: list[Window], samples: Samples) -> list[int]:
    """First sample of each window in the whole, which it is a part of."""
    base = samples.__array_interface__["data"][0]
    assert all(np.shares_memory(w.samples, samples) for w in windows), "samples were copied"
    return [(w.samples.__array_interface__["data"][0] - base) // 4 for w in windows]


@pytest.mark.parametrize("seconds", [0.5, 7.99, 8.0, 8.01, 9.5, 16.0, 40.3])
def test_sound_is_cut_where_it_is_quiet_and_no_window_is_short(seconds) -> None:
    samples = noise(seconds)
    pauses = [int(RATE * second) for second in (6.9, 13.2, 20.0, 27.5, 34.0)]
    for pause in pauses:
        samples[pause : pause + 1600] = 0
    found = cut(samples)
    firsts = starts(found, samples)
    ends = [first + len(w.samples) for first, w in zip(firsts, found, strict=True)]
    assert (firsts[0], firsts[1:], ends[-1]) == (0, ends[:-1], len(samples))
    assert all(len(w.samples) <= 8 * RATE for w in found)
    if len(found) > 1:
        assert all(len(w.samples) >= RATE for w in found)
    if seconds > 8.5:
        assert all(any(p <= end <= p + 1600 for p in pauses) for end in ends[:-1])


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 8.01, 8.99, 9.0, 17.5, 40.3])
@pytest.mark.parametrize("piece_s", [0.02, 0.7, 9.3, 15.4, 15.8, 60.0])
@pytest.mark.parametrize("last", [1.0, 0.1])
@pytest.mark.diagonal
def test_windows_of_sound_that_arrives_are_those_of_the_whole(
    timed, seconds, piece_s, last
) -> None:
    """None of them is known later than after 9 s of its own.

    Sound that gets quieter is cut as late as may be: a window that is taken too early is seen.
    """
    samples = noise(seconds) * np.linspace(1, last, round(RATE * seconds), dtype=np.float32)
    samples[int(11.3 * RATE) : int(13.1 * RATE)] = 0
    growing, found, piece = GrowingWindows(8.0, timed), list[Window](), int(RATE * piece_s)
    for start in range(0, len(samples), piece):
        found += growing.push(samples[start : start + piece])
        assert growing.held < 9 * RATE
    early = len(found)
    found += growing.finish()
    whole = cut(samples, timed=timed)
    assert times(found) == times(whole)
    for made, wanted in zip(found, whole, strict=True):
        assert np.array_equal(made.samples, wanted.samples)
    assert (growing.length, growing.held) == (len(samples), 0)
    assert len(found) - early <= 2


def test_silence_of_a_second_is_left_out_and_times_are_those_of_the_sound() -> None:
    spoken = [(1.5, 2.5), (3.2, 4.0), (5.5, 6.1), (30.0, 30.5)]
    samples = silence(33)
    for start, end in spoken:
        samples[round(start * RATE) : round(end * RATE)] = noise(end - start)
    found = cut(samples)
    assert times(found) == [(1.5, 4.0), (5.5, 6.1), (30.0, 30.5)]
    assert [first / RATE for first in starts(found, samples)] == [1.3, 5.3, 29.8]
    assert [len(w.samples) / RATE for w in found] == [2.9, 1.0, 0.9]


@pytest.mark.parametrize("timed", [True, False])
def test_short_sound_with_short_pauses_is_one_window_of_all_its_samples(timed) -> None:
    samples = np.concatenate((silence(0.9), noise(2), silence(0.9), noise(0.33), silence(0.94)))
    (window,) = cut(samples, timed=timed)
    assert np.array_equal(window.samples, samples)
    assert times([window]) == [(0.9, 4.15)]


def test_for_text_alone_a_short_sound_is_one_window_whatever_its_pauses() -> None:
    samples = np.concatenate((silence(9), noise(2), silence(9), noise(1), silence(8.9)))
    (window,) = cut(samples, 30.0, timed=False)
    assert np.array_equal(window.samples, samples)
    assert times([window]) == [(9.0, 21.0)]
    longer = np.concatenate((samples, silence(0.2)))
    assert times(cut(longer, 30.0, timed=False)) == [(9.0, 11.0), (20.0, 21.0)]


def test_silence_and_soft_steady_noise_have_no_windows() -> None:
    for timed in (True, False):
        for seconds in (0, 0.03, 7, 8.5, 100):
            for db in (-300, -72, -50):
                assert cut(noise(seconds, db), timed=timed) == []


@pytest.mark.parametrize("offset", [0.006, -0.01, 0.4])
def test_a_constant_offset_is_silence(offset) -> None:
    offset = np.float32(offset)
    assert cut(silence(9.0) + offset) == cut(silence(0.5) + offset, timed=False) == []
    plain = np.concatenate([silence(9.0), syllables(1.5, -20), silence(2.0), noise(0.3, -30)])
    assert times(cut(plain + offset)) == times(cut(plain)) != []


@pytest.mark.parametrize("db", [-40, -10])
def test_loud_steady_sound_is_in_windows_whole(db) -> None:
    samples = noise(100, db)
    found = cut(samples)
    assert np.array_equal(np.concatenate([w.samples for w in found]), samples)


def test_noise_that_sound_stands_out_of_is_silence_also_where_nothing_does() -> None:
    samples = noise(60, -43)
    samples[5 * RATE : 7 * RATE] = noise(2, -15)
    assert times(cut(samples)) == [(5.0, 7.0)]


@pytest.mark.parametrize(("loud", "soft"), [(-3, -40), (-20, -60), (-300, -60)])
def test_soft_sound_beside_a_loud_one_is_heard(loud, soft) -> None:
    samples = np.concatenate((noise(20, loud), silence(2), noise(3, soft), silence(2)))
    assert times(cut(samples))[-1] == (22.0, 25.0)


@pytest.mark.parametrize("seed", range(6))
def test_every_sound_is_in_a_window_and_windows_are_apart(seed) -> None:
    dice = np.random.default_rng(seed)
    parts, bursts, at = list[Samples](), list[tuple[int, int]](), 0
    for _ in range(60):
        parts += [
            silence(dice.exponential(1.0)),
            syllables(dice.exponential(2.0), dice.uniform(-50, -5)),
        ]
        bursts.append((at + len(parts[-2]), at + len(parts[-2]) + len(parts[-1])))
        at = bursts[-1][1]
    samples = np.concatenate(parts)
    for longest_s, timed in ((8.0, True), (30.0, False), (5.0, True)):
        found = cut(samples, longest_s, timed)
        covered = np.zeros(len(samples), int)
        for first, window in zip(starts(found, samples), found, strict=True):
            covered[first : first + len(window.samples)] += 1
            assert len(window.samples) <= longest_s * RATE
            assert first / RATE <= window.start_s < window.end_s
            assert window.end_s <= (first + len(window.samples)) / RATE
        assert covered.max() == 1
        lost = [(a, b) for a, b in bursts if b > a and not covered[a:b].all()]
        assert lost == []


@pytest.mark.parametrize(("noise_db", "most_s"), [(None, 0.05), (-55, 0.2)])
def test_times_are_those_of_the_synthesiser(noise_db, most_s) -> None:
    """docs/serving.md has these tolerances. Speech is at -20 to -10 dB."""
    dice = random.Random(1)
    parts, wanted, at = list[Samples](), list[tuple[float, float]](), 0
    for words in ("five", "Could you tell me when the next train leaves?", "hello", "three four"):
        clip = speak(words, VOICES[dice.choice(sorted(VOICES))], RATE)
        parts += [silence(dice.uniform(1.3, 4)), 0.3 * clip / np.abs(clip).max()]
        wanted.append(((at + len(parts[-2])) / RATE, (at + len(parts[-2]) + len(clip)) / RATE))
        at += len(parts[-2]) + len(clip)
    samples = np.concatenate([*parts, silence(2)])
    if noise_db is not None:
        samples += (10 ** (noise_db / 20) * pink_noise(len(samples), dice)).astype(np.float32)
    found = [(w.start_s, w.end_s) for w in cut(samples)]
    assert np.array(found) == pytest.approx(np.array(wanted), abs=most_s)
