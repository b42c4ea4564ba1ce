"""Files of every container and codec that can be written here: read rightly, warned of, or refused.

`make test` reads each file whole and with one damage, taken in turn; `make test-all` with all.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron.errors import AudioError
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from testing.media_corpus import pictures, sounds, verdict, videos
from testing.repeats import RUNS_ALL

# By container, a codec that a test must not silently be without.
USUAL = {
    "sndfile WAV": "PCM_16",
    "sndfile FLAC": "PCM_24",
    "sndfile OGG": "OPUS",
    "wav": "pcm_s16le",
    "adts": "aac",
    "mp3": "libmp3lame",
    "ogg": "libopus",
    "mp4": "aac",
    "matroska": "flac",
    "webm": "libopus",
    "asf": "wmav2",
    "caf": "alac",
}


def bad(cases: Iterable[Any], judge: Callable[[Any], verdict.Verdict]) -> list[str]:
    """Return a line for each file that is neither read rightly, nor warned of, nor refused."""
    return [f"{case}: {said.kind}: {said.text}" for case in cases if not (said := judge(case)).good]


# Not SD2: libsndfile writes a second file, "._", beside it, in the working folder.
@pytest.mark.parametrize("container", [c for c in sounds.containers() if c != "sndfile SD2"])
def test_every_sound_is_heard_rightly_or_refused(container: str) -> None:
    for form in sounds.forms(container):
        assert not bad(sounds.cases(form, every=RUNS_ALL), verdict.hear)


@pytest.mark.parametrize("form", pictures.forms())
def test_every_picture_is_seen_rightly_or_refused(form: str) -> None:
    assert not bad(pictures.pictures(form, every=RUNS_ALL), verdict.see)


@pytest.mark.parametrize("container", videos.containers())
def test_every_video_is_seen_rightly_or_refused(container: str) -> None:
    for codec in videos.codecs(container):
        assert not bad(videos.cases(container, codec, every=RUNS_ALL), verdict.watch)


@pytest.mark.parametrize(
    ("container", "codec", "damages"),
    [
        ("apng", "apng", ("joined", "cut")),
        ("dv", "dvvideo", ("cut",)),
        ("mjpeg", "mjpeg", ("cut",)),
        ("mpjpeg", "mjpeg", ("joined", "cut")),
        ("mxf", "mpeg2video", ("joined", "cut")),
        ("obu", "libsvtav1", ("cut",)),
        ("smjpeg", "mjpeg", ("joined", "cut")),
    ],
)
def test_what_is_not_used_of_a_video_is_told(
    container: str, codec: str, damages: tuple[str, ...]
) -> None:
    cases = [c for c in videos.cases(container, codec, every=True) if c.damage in damages]
    assert {verdict.watch(case).kind for case in cases} <= {"warned", "refused"}


def test_a_stream_that_begins_later_is_no_error() -> None:
    """PyAV ends the second of joined SWF files, which has another rate, with an IndexError."""
    whole = sounds.whole(sounds.Form("swf", "libmp3lame"))
    assert whole is not None
    case = sounds.MAKERS["joined rates"](whole)
    assert case is not None
    assert verdict.hear(case).good


def usual(container: str) -> list[sounds.Case]:
    """Return the files of a usual container and codec, the whole one first."""
    forms = sounds.forms(container) if container in sounds.containers() else ()
    cases = [
        case
        for form in forms
        if form.codec == USUAL[container]
        for case in sounds.cases(form, every=False)
    ]
    if not cases:
        pytest.skip(f"this PyAV does not write {USUAL[container]} in {container}")
    return cases


@pytest.mark.parametrize("container", USUAL)
def test_usual_sounds_are_in_the_corpus_and_heard(container: str) -> None:
    assert verdict.hear(usual(container)[0]).kind == "right"


def test_every_damage_has_its_turn() -> None:
    assert len(set(sounds.turns().values())) > 5 * len(sounds.MAKERS)


def _without_the_middle(wave: np.ndarray) -> np.ndarray:
    return np.delete(wave, slice(len(wave) // 3, 2 * len(wave) // 3))


def _refusing(said: str) -> Callable[[np.ndarray], np.ndarray]:
    def refuse(wave: np.ndarray) -> np.ndarray:
        raise AudioError(said)

    return refuse


def _writing(wave: np.ndarray) -> np.ndarray:
    os.write(2, b"Note: Illegal Audio-MPEG-Header\n")
    return wave


FAULTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "cut": (lambda wave: wave[: len(wave) // 2], "wrong"),
    "shorter": (lambda wave: wave[:-500], "length"),
    "without-the-middle": (_without_the_middle, "wrong"),
    "twice": (lambda wave: np.tile(wave, 2), "length"),
    "at-half-the-rate": (lambda wave: np.repeat(wave, 2), "wrong"),
    "of-one-channel": (lambda wave: wave / 0.7, "wrong"),
    "in-another-order": (lambda wave: np.roll(wave, len(wave) // 2), "wrong"),
    "noise": (lambda wave: np.random.default_rng(0).standard_normal(wave.shape), "wrong"),
    "warned-of": (lambda wave: wave, "false alarm"),
    "written-to-stderr": (_writing, "bad manners"),
    "refused-without-a-cause": (
        _refusing("here: 9 bytes can't be read (Unspecified internal error.)."),
        "bad manners",
    ),
    "refused-without-a-name": (_refusing("here can't be read."), "bad manners"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_reader_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the judge overlooks could be in the package, too."""
    change, kind = FAULTS[fault]

    def faulty(*args: Any, warn: verdict.Warn, **fields: Any) -> np.ndarray:
        if fault == "warned-of":
            warn("here: the file is cut short.")
        return change(load_waveform(*args, **fields))

    whole = usual("sndfile WAV")[0]
    assert verdict.hear(whole).kind == "right"
    monkeypatch.setattr(verdict, "load_waveform", faulty)
    assert verdict.hear(whole).kind == kind


def test_a_file_that_pyav_reads_may_not_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = usual("sndfile WAV")[0]
    refuse = _refusing(f"here: {len(whole.content)} bytes can't be read, for a reason.")
    monkeypatch.setattr(verdict, "load_waveform", lambda *_, **__: refuse(np.empty(0)))
    assert verdict.hear(whole).kind == "refused what PyAV reads"
