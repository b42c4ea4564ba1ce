"""Speech over HTTP, by OpenAI's own client: it is `say`."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.serving.endpoints import speech
from qwen3_omni_neuron.serving.endpoints.sound import SoundEncoder
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import client_of, same_sound, serving, wait_until

MODEL = "qwen3-omni"
TEXT = "Hello there, you."
ASKED: dict[str, Any] = {"model": MODEL, "input": TEXT, "voice": "Chelsie"}
OPTIONS = {"seed": 3, "talker_max_new_tokens": 20}
FIXED = {**OPTIONS, "chunk_frames": [4]}
SPEECH: dict[str, Any] = {**ASKED, "extra_body": OPTIONS}


@pytest.fixture(scope="module")
def server(omni) -> Iterator[Server]:
    limits: dict[str, Any] = {"max_body_bytes": 700_000, "max_media_bytes": 600_000}
    with serving(omni, **limits, max_media_s=20.0, body_timeout_s=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def said(omni) -> Any:
    return omni.say(TEXT, speaker="Chelsie", **OPTIONS)  # type: ignore[arg-type]


def events_of(answer: bytes) -> list[dict[str, Any]]:
    lines = answer.decode().split("\n\n")
    assert lines[-1] == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("sound_format", ["mp3", "opus", "aac", "flac", "wav", "pcm", None])
def test_speech_in_every_format_is_what_say_says(client, said, sound_format) -> None:
    wanted = {} if sound_format is None else {"response_format": sound_format}
    answer = client.audio.speech.create(**SPEECH, **wanted)
    kinds = {"wav": "wav", "opus": "ogg", "flac": "flac", "pcm": "pcm", "aac": "aac"}
    assert answer.response.headers["content-type"] == f"audio/{kinds.get(sound_format, 'mpeg')}"
    if sound_format == "pcm":
        return same_sound(answer.content, said.audio)
    if sound_format in ("wav", "flac"):
        samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="int16")
        assert rate == 24000
        return same_sound(samples, said.audio)
    samples = load_waveform({"audio": answer.content}, 24000, "answer")
    padding = {"opus": 0, "aac": 3 * 1024}.get(sound_format, 2 * 1152)  # frames, at both ends
    assert 0 <= len(samples) - len(said.audio) <= padding
    return None


def test_samples_are_those_of_say_to_the_bit_where_chunks_are_the_same(client, omni) -> None:
    result = omni.say(TEXT, speaker="Chelsie", **FIXED)
    asked = {**SPEECH, "extra_body": FIXED, "response_format": "pcm"}
    assert client.audio.speech.create(**asked).content == pcm16(result.audio)


@pytest.mark.parametrize("sound_format", ["pcm", "wav", "mp3", "opus", "aac", "flac"])
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_streamed_speech_is_the_whole_one(client, said, sound_format, stream_format) -> None:
    asked = {**SPEECH, "response_format": sound_format, "stream_format": stream_format}
    asked["extra_body"] = FIXED
    with client.audio.speech.with_streaming_response.create(**asked) as answer:
        data = b"".join(answer.iter_bytes())
        kind = answer.headers["content-type"]
    if stream_format == "sse":
        assert kind.startswith("text/event-stream")
        *deltas, done = events_of(data)
        assert {event["type"] for event in deltas} == {"speech.audio.delta"}
        assert (len(deltas) > 1) == (sound_format != "flac")
        data = b"".join(base64.b64decode(event["audio"]) for event in deltas)
        tokens, frames = said.timings.text_tokens, said.timings.frames
        usage = {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
        end = {"finish_reason": "length", "usage": usage}
        assert done == {"type": "speech.audio.done", **end}
    if sound_format not in ("pcm", "wav"):
        del asked["stream_format"]
        assert data == client.audio.speech.create(**asked).content
        return
    assert data.count(b"RIFF") == (sound_format == "wav")
    same_sound(data[44 * (sound_format == "wav") :], said.audio)


def test_speech_of_a_chat_is_encoded_while_it_is_made(client) -> None:
    def pieces(sound_format: str) -> list[bytes]:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            modalities=["text", "audio"],
            audio={"voice": "Chelsie", "format": sound_format},
            stream=True,
            extra_body={**FIXED, "thinker_max_new_tokens": 4},
        )
        deltas = [chunk.choices[0].delta.to_dict().get("audio", {}) for chunk in chunks]
        return [base64.b64decode(delta["data"]) for delta in deltas if "data" in delta]

    samples = np.frombuffer(b"".join(pieces("pcm16")), "<i2") / np.float32(32767)
    for sound_format in ("mp3", "opus", "aac"):
        made, encoder = pieces(sound_format), SoundEncoder(sound_format)
        assert len(made) > 2
        assert b"".join(made) == encoder.push(samples) + encoder.finish()


@pytest.mark.parametrize(("limit", "reason"), [(4, "length"), (2000, "stop")])
def test_speech_that_a_limit_has_cut_says_so(client, limit, reason) -> None:
    asked = {**SPEECH, "extra_body": {**OPTIONS, "talker_max_new_tokens": limit}}
    made = client.audio.speech.create(**asked, response_format="wav")
    assert made.response.headers["x-finish-reason"] == reason
    streamed = client.audio.speech.create(**asked, stream_format="sse")
    assert events_of(streamed.content)[-1]["finish_reason"] == reason


def test_another_speed_takes_another_time(client, said) -> None:
    for speed in (0.3, 0.5, 1.5, 4.0):
        asked = {**SPEECH, "speed": speed}
        whole = client.audio.speech.create(**asked, response_format="wav").content
        samples, rate = soundfile.read(io.BytesIO(whole), dtype="float32")
        assert len(samples) / rate == pytest.approx(len(said.audio) / 24000 / speed, abs=1e-4)
        same_sound(client.audio.speech.create(**asked, response_format="pcm").content, samples)


def test_a_wrong_request_for_speech_names_what_is_wrong(client) -> None:
    for change, status, param in (
        ({"model": "gpt"}, 404, "model"),
        ({"input": ""}, 400, "input"),
        ({"input": " \n"}, 400, "input"),
        ({"input": "x" * 40_000}, 400, "input"),
        ({"input": ["x"]}, 400, "input"),
        ({"voice": "Bob"}, 400, "voice"),
        ({"voice": {"id": "Bob"}}, 400, "voice"),
        ({"response_format": "m4a"}, 400, "response_format"),
        ({"response_format": "pcm24"}, 400, "response_format"),
        ({"speed": 0.2}, 400, "speed"),
        ({"speed": 4.1}, 400, "speed"),
        ({"stream_format": "mp3"}, 400, "stream_format"),
        ({"thinker_top_k": 1}, 400, "thinker_top_k"),
        ({"speaker": "Ethan"}, 400, "speaker"),
        ({"talker_top_k": -1}, 400, "talker_top_k"),
        ({"seed": 2**63}, 400, "seed"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.post("/audio/speech", body={**ASKED, **change}, cast_to=object)
        assert refused.value.status_code == status
        error = refused.value.body
        assert isinstance(error, dict)
        assert error["param"] == param
        assert refused.value.request_id


def test_speech_that_fails_once_it_has_begun_is_cut_and_not_ended(
    omni, server, monkeypatch
) -> None:

    def failing(*_: Any) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(speech.SpokenText, "_last", failing)
    with client_of(server) as client:
        streamed = client.audio.speech.with_streaming_response
        asked = {**SPEECH, "response_format": "pcm"}
        with streamed.create(**asked) as answer, pytest.raises(Exception, match="incomplete"):
            list(answer.iter_bytes())
        with streamed.create(**asked, stream_format="sse") as answer:
            *_, last = events_of(b"".join(answer.iter_bytes()))
        assert last["error"]["code"] == "internal_error"
        with pytest.raises(openai.InternalServerError):
            client.audio.speech.create(**{**SPEECH, "response_format": "wav"})
    wait_until(lambda: omni.status().running == 0)
