"""Words over HTTP, with the checkpoint that ships: they are said, heard and written down."""

import base64
import io
import json
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import jiwer
import pytest
import soundfile
from openai import OpenAI

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from testing.http_client import HttpClient
from testing.http_server import client_of, serving
from testing.imports import ROOT
from testing.repeats import again
from train.judge import Judge
from train.speech import MEASURING, RATE, spoken_clip
from train.vocabulary import SPOKEN, prompts

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


def test_a_spoken_sum_is_answered_aloud(speaking: OpenAI, judge: Judge) -> None:
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
def test_every_word_is_said_in_each_voice(speaking: OpenAI, judge: Judge, voice: str) -> None:
    for text in (" ".join(SPOKEN), LONG_TEXT):
        answer = speaking.audio.speech.create(
            model=MODEL, input=text, voice=voice, response_format="wav", extra_body={"seed": 0}
        )
        assert heard(judge, answer.content) == (text.split(), {voice.lower()})


def test_words_are_heard_at_another_speed(speaking: OpenAI, judge: Judge) -> None:
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


def test_held_out_renderings_are_transcribed(speaking: OpenAI) -> None:
    """With voices' speeds, pitches and a noise that training left out."""
    rng, words, texts = random.Random("transcribe"), list[str](), list[str]()
    for prompt in prompts(rng, 40, heard=True, held_out=True):
        if prompt.says_again:
            file = io.BytesIO()
            soundfile.write(file, spoken_clip(prompt.reply, MEASURING, rng), RATE, format="WAV")
            sent = ("a.wav", file.getvalue())
            words.append(prompt.reply)
            texts.append(speaking.audio.transcriptions.create(model=MODEL, file=sent).text)
    assert len(texts) > 20
    assert jiwer.wer(words, texts) <= 0.05


def test_what_is_said_is_transcribed(speaking: OpenAI) -> None:
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


# Requests of applications, as their sources make them


def test_open_webui_0_12_lists_chats_speaks_and_transcribes(speaking: OpenAI, judge: Judge) -> None:
    """Its recordings come in a form whose length it does not know, so that it is sent in chunks."""
    assert speaking.base_url.host and speaking.base_url.port
    address = f"http://{speaking.base_url.host}:{speaking.base_url.port}/v1"
    with HttpClient(address) as open_webui:  # it asks for lists without its key
        assert open_webui.ask("/audio/models").status == 404, "then it asks for /models"
        assert [model["id"] for model in open_webui.ask("/models").json()["data"]] == [MODEL]
        voices = open_webui.ask("/audio/voices").json()["voices"]
        names = {voice["id"]: voice["name"] for voice in voices}
        assert names == {name: name for name in ("Aiden", "Chelsie", "Ethan")}
    with HttpClient(address, "none") as open_webui:
        asked = {"input": "three five", "voice": "alloy", "model": "tts-1"}
        spoken = open_webui.ask("/audio/speech", asked)
        assert (spoken.status, spoken.headers["content-type"]) == (200, "audio/mpeg")
        samples, rate = soundfile.read(io.BytesIO(spoken.body), dtype="float32")
        assert rate == 24000
        assert [word.word for word in judge.hear(samples)] == ["three", "five"]
        asked = {
            "stream": True,
            "model": MODEL,
            "messages": [{"role": "user", "content": "say red"}],
        }
        reply = open_webui.ask("/chat/completions", asked).body
        assert b'"content":"red"' in reply.replace(b": ", b":")
        assert reply.endswith(b"data: [DONE]\n\n")
    connection = HTTPConnection(speaking.base_url.host, speaking.base_url.port)
    part = '--mark\r\nContent-Type: {}\r\nContent-Disposition: form-data; name="{}"'
    text = "text/plain; charset=utf-8"
    fields = [f"{part.format(text, 'model')}\r\n\r\nwhisper-1\r\n".encode()]
    fields += [f"{part.format(text, 'language')}\r\n\r\nen\r\n".encode()]
    head = part.format("application/octet-stream", "file") + '; filename="recording.mp3"\r\n\r\n'
    sound = [spoken.body[at : at + 1000] for at in range(0, len(spoken.body), 1000)]
    body = iter([*fields, head.encode(), *sound, b"\r\n--mark--\r\n"])
    headers = {"Content-Type": "multipart/form-data; boundary=mark", "Authorization": "Bearer none"}
    connection.request("POST", "/v1/audio/transcriptions", body, headers)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["text"]) == (200, "three five")
    connection.close()
