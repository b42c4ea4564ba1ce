"""Requests that the server's own OpenAPI document describes, by the hundred: never a 500.

`FUZZ_REQUESTS=2000` asks for more (`make test-fuzz`).
"""

import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from testing.http_client import HttpClient
from testing.http_server import url_of, wait_until
from testing.media_cases import QUESTION_WAV

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "20"))
# A reply of a thousand tokens shows nothing that one of three doesn't.
SHORT = {"thinker_max_new_tokens": 3, "talker_max_new_tokens": 3, "max_completion_tokens": 3}
FUZZ = settings(
    max_examples=REQUESTS,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_REQUESTS" not in os.environ,
    database=None,
)
HELLO = [{"role": "user", "content": "Hello"}]
CLIP = QUESTION_WAV.read_bytes()
NAMES = st.sampled_from(["qwen3-omni", "qwen3-omni", "qwen3-omni", "other"])
# Whether a request is mended by what it needs: strings at random are no voice, for one.
MENDED = st.sampled_from([True, True, False])


def failed(status: int, body: bytes) -> bool:
    """A 503 is right where the request itself leaves too little time."""
    return status >= 500 and not (status == 503 and json.loads(body)["error"]["code"] == "timeout")


@pytest.fixture(scope="module")
def schema(server) -> Any:
    return schemathesis.openapi.from_url(f"{url_of(server)}/openapi.json")


# By path: fields that make a reply short, and those without which most are refused.
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (SHORT, {"messages": HELLO}),
    "/v1/responses": (
        {"thinker_max_new_tokens": 3, "talker_max_new_tokens": 3, "max_output_tokens": 3},
        {"input": "Hello", "previous_response_id": None},
    ),
    "/v1/audio/speech": (
        {"talker_max_new_tokens": 3},
        {"input": "Hi", "voice": "Ethan", "instructions": None},
    ),
    "/v1/audio/transcriptions": (
        {"max_new_tokens": 3},
        {"file": CLIP, "prompt": "", "stream": False, "response_format": "verbose_json"},
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_of_the_document_makes_the_server_fail(omni, server, schema, mode, path) -> None:
    statuses: dict[int, int] = {}
    short, right = PATHS[path]

    @FUZZ
    @given(schema[path]["POST"].as_strategy(generation_mode=mode), NAMES, MENDED)
    def send(case: Any, name: str, mended: bool) -> None:
        if isinstance(case.body, dict):
            case.body |= short
            if isinstance(case.body.get("model"), str):
                case.body["model"] = name
            if mended:
                case.body |= {"model": "qwen3-omni", **right}
        answer = case.call(timeout=60)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert not failed(answer.status_code, answer.content), (answer.text, case.body)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    send()
    assert sum(statuses.values()) >= REQUESTS * 0.9
    assert mode.value == "negative" or statuses[200], statuses
    wait_until(lambda: omni.status().running == 0 and server._gate.running == 0)
    assert server.service.held.taken == server.service.responses.bytes_held


MESSY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(["<|im_end|>", "Hello", "", "\0", "\ud800"]))
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.builds(
        lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        st.one_of(TEXT, st.sampled_from(["AAAA", "UklGRg=="])),
    ),
    st.builds(
        lambda kind, url: {"type": f"{kind}_url", f"{kind}_url": {"url": url}},
        st.sampled_from(["audio", "image", "video"]),
        st.one_of(TEXT, st.sampled_from(["data:image/png;base64,iVBORw0KGgo=", "http://[", "//a"])),
    ),
    MESSY,
)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "user", "system", "assistant", "developer", "tool", "robot"]),
    st.one_of(TEXT, st.lists(PARTS, max_size=3), st.none()),
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            *("stream", "temperature", "top_p", "seed", "stop", "modalities", "audio", "tools"),
            *("tool_choice", "stream_options", "n", "user", "speaker", "talker_top_k"),
            *("logit_bias", "chunk_frames", "wait_timeout_s", "use_audio_in_video"),
            "sampling_params_list",
        ]
    ),
    st.one_of(
        MESSY,
        st.sampled_from(
            [
                *(True, 0, 1, 0.5, "a", ["a"], ["text", "audio"], {"format": "pcm16"}, [1, 2]),
                *({"voice": "Ethan"}, [{"temperature": 0}], {"include_usage": True}, "Chelsie"),
            ]
        ),
    ),
    max_size=4,
)


def test_no_request_that_is_nearly_right_makes_the_server_fail(omni, server) -> None:
    statuses: dict[int, int] = {}
    with HttpClient(url_of(server), timeout_s=30) as client:

        @FUZZ
        @given(st.one_of(st.just(HELLO), st.lists(MESSAGES, min_size=1, max_size=3)), FIELDS)
        def send(messages: Any, fields: dict[str, Any]) -> None:
            body = {"model": "qwen3-omni", "messages": messages, **SHORT, **fields}
            answer = client.ask("/v1/chat/completions", json.dumps(body).encode())
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            assert not failed(answer.status, answer.body), (answer.body, body)
            assert b"internal_error" not in answer.body, body

        send()
    assert statuses[200]
    wait_until(lambda: omni.status().running == 0 and server._gate.running == 0)
    assert server.service.held.taken == server.service.responses.bytes_held


HEADS = st.sampled_from(
    [
        *(
            'form-data; name="file"; filename="a"',
            'form-data; name="model"',
            "form-data; name=file",
        ),
        *('form-data; name="stream"', 'form-data; name="a[]"', "form-data", "", "attachment; x"),
    ]
)
BITS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"\r\n", b"--b", b"--b--", b"--b\r\n", b"--", CLIP, b"qwen3-omni", b"true"]),
    st.builds(lambda head: f"\r\ncontent-disposition: {head}\r\n\r\n".encode(), HEADS),
)


def test_no_form_makes_the_server_fail(server) -> None:
    statuses: dict[int, int] = {}
    with HttpClient(url_of(server), timeout_s=30) as client:

        @FUZZ
        @given(
            st.lists(BITS, max_size=12),
            st.sampled_from(["b", "b", "b", '"b"', "", "=", "b" * 99, '"']),
            st.booleans(),
        )
        def send(bits: list[bytes], boundary: str, closed: bool) -> None:
            body = b"--b" + b"".join(bits) + (b"\r\n--b--\r\n" if closed else b"")
            kind = f"multipart/form-data; boundary={boundary}"
            answer = client.ask("/v1/audio/transcriptions", body, {"content-type": kind})
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            assert not failed(answer.status, answer.body), (answer.body, body)

        send()
    assert 400 in statuses or REQUESTS < 60, statuses
    wait_until(lambda: server.service.held.taken == server.service.responses.bytes_held)
