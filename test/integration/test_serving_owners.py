"""Keys, rates and the queue: what one owner may see and take, and when it is told to wait."""

from pathlib import Path
from typing import Any

import openai
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of
from testing.raw_http import (
    ASKED,
    HELLO,
    connected,
    head_of,
    status_of,
    still_answers,
)


def test_a_key_is_needed_where_there_are_keys(omni: Qwen3Omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        for key in ("one", "two"):
            with client_of(server, key) as client:
                client.chat.completions.create(**ASKED)
        with client_of(server, "three") as client:
            for call in (lambda: client.chat.completions.create(**ASKED), client.models.list):
                with pytest.raises(Exception, match="401"):
                    call()
        for path, status in (("metrics", 401), ("ready", 200)):
            assert ask(f"{url_of(server)}/{path}").status == status
        # Without a key not even the body is read.
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(300_000))
            assert status_of(sock.recv(1000)) == 401


def test_another_key_can_not_name_a_spoken_reply(omni: Qwen3Omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        spoken: Any = {**ASKED, "modalities": ["audio"], "audio": {"format": "wav"}}
        spoken["extra_body"] = {"talker_max_new_tokens": 3}
        with client_of(server, "one") as one, client_of(server, "two") as two:
            audio = one.chat.completions.create(**spoken).choices[0].message.audio
            assert audio is not None
            turns: Any = [*HELLO, {"role": "assistant", "audio": {"id": audio.id}}, *HELLO]
            one.chat.completions.create(**{**ASKED, "messages": turns})
            with pytest.raises(openai.BadRequestError, match="never was"):
                two.chat.completions.create(**{**ASKED, "messages": turns})


def test_rows_are_shared_within_a_key_alone(omni: Qwen3Omni) -> None:
    words: Any = {**ASKED, "messages": [{"role": "user", "content": "only this test asks so"}]}

    def cached(server: Server, key: str) -> int:
        with client_of(server, key) as client:
            usage = client.chat.completions.create(**words).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    with serving(omni, api_keys=("uno", "due")) as server:
        assert cached(server, "uno") == 0
        assert cached(server, "uno") > 10
        assert cached(server, "due") == 0


def test_a_caller_who_asks_too_often_is_told_when_to_come_back(omni: Qwen3Omni) -> None:
    with serving(omni, requests_per_minute=2) as server, client_of(server) as client:
        for _ in range(2):
            client.chat.completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ASKED)
        assert 25 <= int(refused.value.response.headers["retry-after"]) <= 31


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
    with (
        Qwen3Omni.load(checkpoint, max_concurrency=1, max_queued=1) as omni,
        serving(omni) as server,
        client_of(server) as client,
    ):
        streams = [omni.stream(HELLO) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="requests wait") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        still_answers(url_of(server))
