"""Extras that OpenAI's clients expect: usage, headers, errors, secrets, comments."""

import json
from typing import Any

import openai
import pytest

from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.serving.edge import sending
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of
from testing.raw_http import ASKED, HELLO

MODEL = "qwen3-omni"
FEW: dict[str, Any] = {"talker_max_new_tokens": 4, "seed": 3}


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    """Return the objects of a stream of events."""
    events = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_chunks_before_the_last_have_null_usage_where_usage_is_asked_for(server, path) -> None:
    asked = {"messages": HELLO, "prompt": "Hello", "max_tokens": 4, "stream": True}
    asked.pop("messages" if path == "completions" else "prompt")
    for options, null in (({"include_usage": True}, True), ({}, False)):
        body = {**asked, "stream_options": options}
        *before, last = chunks_of(ask(f"{url_of(server)}/v1/{path}", body))
        assert all(("usage" in one, one.get("usage")) == (null, None) for one in before)
        assert bool(last.get("usage")) == null and before


def test_speech_needs_no_voice_and_streams_by_either_name(omni, client) -> None:
    asked: Any = {"model": MODEL, "input": "Hi.", "voice": openai.omit}
    answers = [
        client.audio.speech.create(**asked, response_format="wav", extra_body={**FEW, **extra})
        for extra in ({}, {"stream": True}, {"stream_format": "audio"}, {"language": "Auto"})
    ]
    assert {answer.response.headers["x-voice"] for answer in answers} == {RequestOptions().speaker}
    streamed = ["content-length" not in answer.response.headers for answer in answers]
    assert streamed == [False, True, True, False]
    assert answers[1].content == answers[2].content


def test_answers_tell_their_time_and_the_rate_that_is_left(omni, client) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    assert 0 < int(raw.headers["openai-processing-ms"]) < 600_000
    assert not [name for name in raw.headers if name.startswith("x-ratelimit")]
    with serving(omni, requests_per_minute=2) as server, client_of(server) as limited:
        for left in (1, 0):
            told = limited.chat.completions.with_raw_response.create(**ASKED).headers
            assert told["x-ratelimit-limit-requests"] == "2"
            assert told["x-ratelimit-remaining-requests"] == str(left)
            assert 0 < float(told["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        with pytest.raises(openai.RateLimitError) as refused:
            limited.chat.completions.create(**ASKED)
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_wrong_keys_error_is_of_openais_type(omni) -> None:
    with serving(omni, api_keys=("one",)) as server, client_of(server, "two") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert (refused.value.type, refused.value.code) == (
            "invalid_request_error",
            "invalid_api_key",
        )


def test_a_stream_that_waits_has_comments(omni, monkeypatch) -> None:
    monkeypatch.setattr(sending, "WAITING_S", 0.05)
    thinker = omni._pipeline._engines.thinker
    prefill = thinker.prefill

    def late(*arguments: Any) -> Any:
        sending.time.sleep(0.3)
        return prefill(*arguments)

    with serving(omni) as server:
        url = f"{url_of(server)}/v1/chat/completions"
        body = {"messages": HELLO, "max_tokens": 2, "stream": True, "cache_key": "waits"}
        monkeypatch.setattr(thinker, "prefill", late)
        answer = ask(url, body)
        assert answer.body.startswith(b": waiting\n\n") and answer.body.endswith(
            b"data: [DONE]\n\n"
        )
        whole = ask(url, {**body, "stream": False, "cache_key": "waits too"})
        assert whole.status == 200 and json.loads(whole.body)["usage"]
        with client_of(server) as client:
            asked: Any = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 2}
            assert [*client.chat.completions.create(**asked)][-1].choices
