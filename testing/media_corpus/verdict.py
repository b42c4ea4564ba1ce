"""Verdict on what the package makes of a file: right, warned of, refused, or wrong."""

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.prompt.media.audio import MAX_RATE, load_waveform
from qwen3_omni_neuron.prompt.media.image import FORMATS, load_image
from qwen3_omni_neuron.prompt.media.video_file import read_video_file
from qwen3_omni_neuron.prompt.media.video_times import Sampling
from testing.media_corpus import hearing, pictures, videos
from testing.media_corpus.sounds import SECONDS, Case, Mono, signal

Warn = Callable[[str], object]
WHERE = "here"
LIMIT_S = 5.0  # of a core's time for a file of about a second
_LOSSLESS = ("pcm", "float", "double", "alac", "flac", "tta", "wavpack", "alaw", "ulaw")
_G72X = ("G721_32", "G723_24", "G723_40", "g726", "g726le")
_BLOCKS = {  # samples of a codec's block, the last of which is filled up
    **dict.fromkeys(_G72X, 120),
    "adpcm_ima_qt": 64,
    "adpcm_ima_wav": 2041,
    "adpcm_ms": 2036,
}
# Codecs that libsndfile alone decodes, or otherwise than FFmpeg, at qualities for voices.
_BY_LIBSNDFILE = (*_G72X, "NMS_ADPCM_16", "NMS_ADPCM_24", "NMS_ADPCM_32")
_LEAST = {  # correlation: of codecs for voices, which chirps and tones are not
    "libopencore_amrnb": 0.5,
    "g723_1": 0.5,
    "real_144": 0.5,
    "dfpwm": 0.5,
    "GSM610": 0.6,
    # FFmpeg's level of G.726 is not libsndfile's.
    **dict.fromkeys(_G72X, 0.9),
}


# Containers of which nothing tells, by damage: their headers have no length, or none that their
# writer fills in, and their ends no mark, or they have no head that a second one could be known by.
_UNTOLD = {
    "cut": {
        *("IRCAM", "PAF", "PVF", "RAW", "XI", "ircam", "sox", "spdif", "rm"),
        *("adx", "alp", "apm", "argo_asf", "kvag", "roq", "wsaud"),  # of games
        *("h264", "hevc", "m4v"),  # without a container
        *("ac3", "eac3", "dvd", "mpeg", "svcd", "vcd", "vob", "obu"),  # between two packets
    },
    "joined": {
        *("avm2", "swf", "gxf", "mmf", "rtp_mpegts", "smjpeg", "sox"),
        *("adx", "alp", "apm", "argo_asf", "ast", "kvag", "roq", "wsaud"),
    },
    "after": {"IRCAM", "WVE", "ircam", "alp", "apm", "kvag"},  # junk is sound to them
}
_TOLD_OF = 0.9  # part of a header's length, which is not exact to a packet


@dataclass(frozen=True)
class Verdict:
    """Verdict on one file.

    kind: "right", "warned", "refused", "untold", or what is wrong. text: the particulars.
    """

    kind: str
    text: str

    @property
    def good(self) -> bool:
        return self.kind in ("right", "warned", "refused", "untold")

    def unless_untold(self, damage: str, container: str) -> "Verdict":
        """Return the verdict where nothing in a container tells of a damage."""
        excused = container in _UNTOLD.get(damage, ()) and self.kind != "bad manners"
        return Verdict("untold", self.text) if excused and not self.good else self


@dataclass(frozen=True)
class Outcome:
    """Value or error with which a reader ended. wrong: what is wrong with either."""

    value: Any
    warnings: list[str]
    error: InputError | None
    wrong: str | None


def read(reader: Callable[[Warn], Any], size: int) -> Outcome:
    """Call a reader with its function for warnings. size: of the file in bytes."""
    said: list[str] = []
    value, error = None, None
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        begin_s = time.process_time()
        try:
            value = reader(said.append)
        except InputError as reason:
            error = reason
        finally:
            cpu_s = time.process_time() - begin_s
            os.dup2(kept, 2)
            os.close(kept)
        caught.seek(0)
        written = caught.read()
    wrong = None
    if written:
        wrong = f"wrote to the standard error: {written[:200]!r}"
    elif cpu_s > LIMIT_S:
        wrong = f"took {cpu_s:.1f} s"
    elif error is not None:
        wrong = _vague(str(error), size)
    else:
        bad = (text for text in said if not re.fullmatch(rf"{WHERE}\b.*\.", text, re.S))
        wrong = next((f"warned without a sentence: {text}" for text in bad), None)
    return Outcome(value, said, error, wrong)


def _vague(said: str, size: int) -> str | None:
    """Return what an error's sentence lacks, if anything."""
    if not said.startswith(WHERE) or "nspecified" in said or " ()" in said:
        return f"refused without a cause: {said}"
    if f"{size} bytes" not in said and not re.search(r"\d samples", said):
        return f"refused without naming the file: {said}"
    return None


def hear(case: Case) -> Verdict:
    """Read a file of the corpus as sound, at its own rate."""
    return _heard(case).unless_untold(case.damage, case.form.container)


def _heard(case: Case) -> Verdict:
    codec = case.form.codec
    rate = 48000 if "opus" in codec.lower() else case.parts[0].rate
    outcome = read(lambda warn: _waveform(case.content, rate, warn), len(case.content))
    if outcome.wrong:
        return Verdict("bad manners", outcome.wrong)
    if outcome.error is not None:
        return _refused(case, str(outcome.error))
    heard: Mono = outcome.value
    lossless = codec.lower().startswith(_LOSSLESS)
    least = _LEAST.get(codec, 0.999 if lossless else 0.985)
    if len({part.rate for part in case.parts}) > 1:  # resampled, so not in step
        least = min(least, 0.97)
    found = hearing.recognise(
        heard,
        rate,
        case.parts,
        least=least,
        # Of more channels, lossy codecs have one for low frequencies alone.
        levels=lossless or (least > 0.9 and case.parts[0].channels < 3),
        unsure_s=0.15 if case.damage == "cut" else 0.0,
    )
    total = SECONDS * len(case.parts)
    text = f"{found.seconds:.2f} of {total:.2f} s are right, {len(heard) / rate:.2f} s were heard"
    text = f"{text}; {found.wrong or ''} {outcome.warnings}"
    if case.damage in ("whole", "piped", "rate", "channels"):
        return _undamaged(case, heard, rate, found.seconds == total, text, outcome.warnings)
    if outcome.warnings:
        return Verdict("warned", text)
    if found.wrong:
        return Verdict("wrong", text)
    if found.seconds < total and not (
        case.damage == "cut" and len(heard) > _TOLD_OF * total * rate
    ):
        return Verdict("a part", text)
    text = f"{text}, {found.extra_s:.2f} s too much"
    if found.extra_s <= 0.15 * len(case.parts) + 0.05:
        return Verdict("right", text)
    # FFmpeg finds the packets of an AVI twice if its index has another size.
    pieces = [piece for _, piece in hearing.by_pyav(case.content)]
    same = len(pieces) > 0 and _alike(np.concatenate(pieces), heard)
    return Verdict("right" if same else "more", text)


def _undamaged(
    case: Case, heard: Mono, rate: int, recognised: bool, text: str, warnings: list[str]
) -> Verdict:
    """Judge a sound that is all there: the written one or a peer's, and not longer than both."""
    pieces = [piece for _, piece in hearing.by_pyav(case.content)]
    by_pyav = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
    peers = [by_pyav, *hearing.by_libsndfile(case.content, case.form.codec in _BY_LIBSNDFILE)]
    same = any(_alike(peer, heard) for peer in peers)
    lengths = len(signal(0, rate)), len(by_pyav) or len(signal(0, rate))
    text = f"{text}, {len(heard)} samples, not {lengths}"
    if not (recognised or same):
        return Verdict("wrong", text)
    most = max(*lengths, lengths[0] + _BLOCKS.get(case.form.codec, 0))
    if not (same or min(lengths) - 2 <= len(heard) <= most + 2):
        return Verdict("length", text)
    if warnings:
        complete = recognised and len(heard) >= lengths[0] - 2
        return Verdict("false alarm" if complete else "warned", text)
    return Verdict("right", text)


def _alike(one: Mono, other: Mono) -> bool:
    """Return whether two sounds are the same but for rounding."""
    if not 0 < len(one) - 2 <= len(other) <= len(one) + 2:
        return False
    size = min(len(one), len(other))
    louder = float(one.std() / max(other.std(), 1e-9))
    return 0.99 < louder < 1.01 and float(np.corrcoef(one[:size], other[:size])[0, 1]) > 0.999


def _waveform(content: bytes, rate: int, warn: Warn) -> Mono:
    return load_waveform({"audio": content}, rate, WHERE, warn=warn)


def _refused(case: Case, said: str) -> Verdict:
    """Judge a refusal: right where PyAV, packet by packet, can't read the file either."""
    pieces = hearing.by_pyav(case.content)
    if len({rate for rate, _ in pieces}) != 1 or pieces[0][0] > MAX_RATE:
        return Verdict("refused", said)
    rate, mono = pieces[0][0], np.concatenate([piece for _, piece in pieces])
    by_pyav = hearing.recognise(mono, rate, case.parts, least=0.98, levels=False, unsure_s=0.15)
    if by_pyav.seconds < 0.3:
        return Verdict("refused", said)
    return Verdict("refused what PyAV reads", f"{by_pyav.seconds:.2f} s by PyAV; {said}")


def see(case: pictures.Picture) -> Verdict:
    """Read a file of the corpus as a picture."""
    outcome = read(lambda warn: _pixels(case.content, warn), len(case.content))
    if outcome.wrong:
        return Verdict("bad manners", outcome.wrong)
    if outcome.error is not None:
        said = str(outcome.error)
        if case.name == "whole" and case.form in FORMATS:
            return Verdict("refused what Pillow reads", said)
        return Verdict("refused", said)
    if outcome.warnings:
        return Verdict("warned", str(outcome.warnings))
    if outcome.value.shape != case.seen.shape:
        return Verdict("wrong", f"{outcome.value.shape}")
    off = float(np.abs(outcome.value.astype(int) - case.seen).mean())
    return Verdict("right" if off <= case.tolerance else "wrong", f"off by {off:.1f} on average")


def _pixels(content: bytes, warn: Warn) -> np.ndarray:
    return np.asarray(load_image({"image": content}, WHERE, warn=warn))


def watch(case: videos.Clip) -> Verdict:
    """Read a file of the corpus as a video."""
    return _watched(case).unless_untold(case.damage, case.container)


def _watched(case: videos.Clip) -> Verdict:
    outcome = read(lambda warn: _video(case.content, warn), len(case.content))
    if outcome.wrong:
        return Verdict("bad manners", outcome.wrong)
    shown = videos.by_pyav(case.content)
    if outcome.error is not None:
        kind = "refused what PyAV reads" if len(shown) >= 4 else "refused"
        return Verdict(kind, f"{len(shown)} frames by PyAV; {outcome.error}")
    frames = outcome.value.frames
    seconds = len(frames) / outcome.value.fps
    text = f"{seconds:.2f} s, {len(shown)} frames by PyAV {outcome.warnings}"
    length = case.parts * videos.FRAMES / videos.RATE
    if outcome.warnings:
        whole = case.damage in ("whole", "piped") and len(shown) == videos.FRAMES
        return Verdict("false alarm" if whole else "warned", text)
    off = abs(seconds - length)
    most = (1 - _TOLD_OF) * length if case.damage == "cut" else 0.06
    if off > most and case.container not in videos.WITHOUT_RATE:
        return Verdict("a part", text)
    places = [k * len(shown) // len(frames) for k in range(len(frames))]
    alike = [
        # Where there are no presentation times, FFmpeg's are a frame late.
        not shown or any(_same(other, frame) for other in shown[max(0, place - 1) : place + 2])
        for place, frame in zip(places, frames, strict=True)
    ]
    return Verdict("right" if all(alike) else "other frames", f"{text} {alike}")


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(np.abs(one.astype(int) - other).mean() < 3)


def _video(content: bytes, warn: Warn) -> Any:
    return read_video_file(
        content, WHERE, sampling=Sampling(), audio_rate=None, threads=1, warn=warn
    )
