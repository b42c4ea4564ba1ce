"""Words over HTTP, with the checkpoint that ships: they are said, heard and written down."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
import soundfile
from openai import OpenAI

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from testing.http_server import client_of, serving
from testing.imports import ROOT
from testing.repeats import again
from train.judge import Judge
from train.vocabulary import SPOKEN

MODEL = "qwen3-omni"
VOICES = ("Ethan", "Chelsie", "Aiden")
LONG_TEXT = "three five seven\nred goodbye ethan yellow\nyes no hello zero one two three\nsorry"


@pytest.fixture(scope="module")
def speaking() -> Iterator[OpenAI]:
    """A client of a server of the checkpoint that ships."""
    with (
        Qwen3Omni.load(SPEAKING_CHECKPOINT, dtype="float32", max_concurrency=4) as omni,
        serving(omni) as server,
        client_of(server) as client,
    ):
        yield client


def heard(judge: Judge, wav: bytes) -> tuple[list[str], set[str]]:
    """The words that a sound file says, and the voices."""
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == 24000
    words = judge.hear(samples)
    return [word.word for word in words], {word.speaker for word in words}


def test_a_spoken_sum_is_answered_aloud(speaking, judge) -> None:
    sound = base64.b64encode((ROOT / "examples" / "sum.wav").read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": [part]}], "seed": 0}
    answer = speaking.chat.completions.create(
        **asked, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"}
    )
    audio = answer.choices[0].message.audio
    assert audio is not None and audio.transcript == "eight"
    assert heard(judge, base64.b64decode(audio.data)) == (["eight"], {"chelsie"})


@pytest.mark.parametrize("voice", [VOICES[0], *map(again, VOICES[1:])])
def test_every_word_is_said_in_each_voice(speaking, judge, voice) -> None:
    for text in (" ".join(SPOKEN), LONG_TEXT):
        answer = speaking.audio.speech.create(
            model=MODEL, input=text, voice=voice, response_format="wav", extra_body={"seed": 0}
        )
        assert heard(judge, answer.content) == (text.split(), {voice.lower()})


def test_words_are_heard_at_another_speed(speaking, judge) -> None:
    for speed in (0.8, 1.25):
        answer = speaking.audio.speech.create(
            model=MODEL,
            input="three five seven",
            voice="Ethan",
            response_format="wav",
            speed=speed,
            extra_body={"seed": 0},
        )
        assert heard(judge, answer.content)[0] == ["three", "five", "seven"]


def test_what_is_said_is_transcribed(speaking) -> None:
    for voice, sound_format in zip(VOICES, ("mp3", "opus", "flac"), strict=True):
        sound: Any = speaking.audio.speech.create(
            model=MODEL,
            input="three five seven",
            voice=voice,
            response_format=sound_format,  # type: ignore[arg-type]
            extra_body={"seed": 0},
        )
        file = (f"a.{sound_format}", sound.content)
        answer = speaking.audio.transcriptions.create(
            model=MODEL, file=file, response_format="verbose_json"
        )
        assert answer.text == "three five seven", voice
        assert answer.segments is not None
        assert [len(segment.tokens) for segment in answer.segments] == [3]  # without the end
