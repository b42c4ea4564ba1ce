"""Bodies and media that make no sense, or too much: each is refused in its way."""

import base64
import io
import json
import re
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import soundfile
from PIL import Image

from qwen3_omni_neuron.events.encoding import wav_header
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import HttpClient, ask, form
from testing.http_server import client_of, serving, url_of, wait_until
from testing.media_cases import QUESTION_WAV
from testing.raw_http import ASKED, connected, head_of, rest_of, status_of, still_answers


@pytest.fixture(scope="module")
def server(omni) -> Iterator[Server]:
    sizes = {"max_body_bytes": 400_000, "max_media_bytes": 200_000, "max_media": 3}
    with serving(omni, **sizes, max_media_s=20.0, max_pixels=500_000) as running:
        yield running


def test_a_body_that_makes_no_sense_is_a_4xx_in_openais_shape(server) -> None:
    for body in (
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "qwen3-omni", "messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "\xff"}',
        b'{"model": 1e999999, "messages": []}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
        json.dumps({**ASKED, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({**ASKED, "temperature": float("nan")}).encode(),
        json.dumps({**ASKED, "chunk_frames": [1] * 50_000 + [-1]}).encode(),
        json.dumps({**ASKED, "a" * 50_000: 1}).encode(),
    ):
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(len(body), headers={"connection": "close"}) + body)
            answer = rest_of(sock)
        assert status_of(answer) == 400, answer[:300]
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert len(error["message"]) < 4000


def part_of(kind: str, content: bytes | str, media_type: str) -> dict[str, Any]:
    url = content
    if isinstance(content, bytes):
        url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels, with none of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def silence(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, [0.0] * (8000 * seconds), 8000, format="FLAC")
    return file.getvalue()


WAV = QUESTION_WAV.read_bytes()
BAD_MEDIA: list[tuple[dict[str, Any], int, str]] = [
    (part_of("audio", b"no sound at all", "audio/wav"), 400, "invalid_media"),
    (part_of("audio", b"", "audio/wav"), 400, "invalid_media"),
    (part_of("audio", WAV[:30], "audio/wav"), 400, "invalid_media"),
    (part_of("audio", wav_header(16000, 0), "audio/wav"), 400, "invalid_media"),
    (part_of("audio", silence(30), "audio/flac"), 400, "media_too_long"),
    (part_of("audio", png_of(10, 10), "audio/wav"), 400, "invalid_media"),
    (part_of("image", WAV, "image/png"), 400, "invalid_media"),
    (part_of("video", b"<!DOCTYPE html><p>Sign in.", "video/mp4"), 400, "invalid_media"),
    (part_of("image", b"GIF89a", "image/gif"), 400, "invalid_media"),
    (part_of("image", png_of(1000, 1000), "image/png"), 400, "media_too_large"),
    (part_of("image", png_of(60_000, 60_000), "image/png"), 400, "context_length_exceeded"),
    (part_of("image", png_of(10, 10), "image/png"), 400, "invalid_media"),
    (part_of("image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image/eps"), 400, ""),
    (part_of("image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), 400, ""),
    (part_of("video", b"#EXTM3U\n/etc/passwd\n", "video/mp2t"), 400, "invalid_media"),
    (part_of("video", b"ffconcat version 1.0\nfile /etc/passwd\n", "video/mp4"), 400, ""),
    (part_of("video", b"\0" * 1000, "video/mp4"), 400, "invalid_media"),
    (
        {"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}},
        400,
        "invalid_base64",
    ),
    ({"type": "input_audio", "input_audio": {"data": "/etc/passwd", "format": "wav"}}, 400, ""),
    ({"type": "input_audio", "input_audio": {"data": "A" * 300_000}}, 413, "media_too_large"),
    *(
        (part_of(kind, url, ""), 400, "invalid_media_url")
        for kind in ("audio", "image", "video")
        for url in (
            "/etc/passwd",
            "../../etc/passwd",
            "file:///etc/passwd",
            "http://169.254.169.254/latest/meta-data/",
            "http://localhost:1/",
            "ftp://here/a",
            "data:audio/wav,abc",
            "data:,",
            "data:audio/wav;base64" + "x" * 600 + ",AAAA",
            "data:audio/wav;base64;x=y,AAAA",
            "",
        )
    ),
    ({"type": "audio", "audio": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image", "image": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image_url", "image_url": "data:image/png;base64,"}, 400, "invalid_type"),
    ({"type": "image_url"}, 400, "missing_required_parameter"),
]


def test_bad_media_are_refused_each_in_its_way(server) -> None:
    with client_of(server) as client:
        for part, status, code in BAD_MEDIA:
            messages = [{"role": "user", "content": [part]}]
            with pytest.raises(openai.APIStatusError) as refused:
                client.post(
                    "/chat/completions", body={**ASKED, "messages": messages}, cast_to=object
                )
            shown = str(part)[:200]
            assert refused.value.status_code == status, (shown, refused.value)
            assert not code or refused.value.code == code, (shown, refused.value)
            assert str(refused.value.param).startswith("messages[0].content[0]"), refused.value
            assert not re.search("root:| at 0x|/usr/|/home/", str(refused.value))
        four = [{"role": "user", "content": [part_of("audio", WAV[:20_044], "audio/wav")] * 4}]
        with pytest.raises(openai.BadRequestError, match="more than 3 media"):
            client.post("/chat/completions", body={**ASKED, "messages": four}, cast_to=object)
    still_answers(url_of(server))


def test_fields_of_parts_change_what_the_model_gets(server) -> None:
    picture, flac = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (640, 640)).save(picture, "PNG")
    soundfile.write(flac, [0.0] * 32_000, 16_000, format="FLAC")

    def tokens(part: dict[str, Any]) -> int:
        body = {**ASKED, "messages": [{"role": "user", "content": [part]}]}
        with HttpClient(f"{url_of(server)}/v1") as client:
            answer = client.ask("/chat/completions", body)
        assert answer.status == 200, answer.body
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    for part, field, value in (
        (part_of("audio", WAV[:32_044], "audio/wav"), "audio_end", 0.3),
        (part_of("audio", WAV[:32_044], "audio/wav"), "audio_start", 0.7),
        (part_of("audio", flac.getvalue(), ""), "audio_end", 0.5),
        (part_of("image", picture.getvalue(), ""), "max_pixels", 100_000),
        (part_of("image", picture.getvalue(), ""), "detail", "low"),
    ):
        whole = tokens(part)
        assert tokens({**part, field: value}) < whole
        held = part["type"]
        assert tokens({**part, held: {**part[held], field: value}}) < whole


# What is wrong, and the path and the words of the answer.
WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"messages": messages}, param, words)
        for messages, param, words in (
            ("Hi", "messages", "list"),
            (["Hi"], "messages[0]", "an object"),
            ([{"role": "user", "content": 5}], "messages[0].content", "string or a list"),
            ([{"role": "user", "content": [5]}], "messages[0].content[0]", "type: text,"),
            ([{"role": "user", "contnt": "", "content": ""}], "messages[0].contnt", "content"),
            ([{"role": "user", "content": "a", "audio": {"id": "a"}}], "messages[0].audio", ""),
            ([{"role": "user"}], "messages[0].content", "no content"),
            ([{"role": "user", "content": " "}], "messages", "is blank"),
        )
    ),
    ({"tool_choice": "must"}, "tool_choice", "'auto', 'none' or 'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": {"type": "x"}}, "tool_choice.type", "function or allowed_tools"),
    ({"response_format": "json"}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"stop": [1]}, "stop[0]", "string"),
    ({"stop": [""]}, "stop", "1 to 256 characters"),
    ({"talker_top_k": -1}, "talker_top_k", "0"),
    ({"tool_choice": "required"}, "tool_choice", "Set tools"),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
]
PART = "messages[0].content[1]"
PNG = base64.b64encode(png_of(10, 10)).decode()
WRONG_PARTS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "text"}, f"{PART}.text", "required"),
    ({"type": "text", "text": "a", "txt": "b"}, f"{PART}.txt", "Did you mean text?"),
    ({"type": "picture"}, f"{PART}.type", "image_url"),
    ({"type": "image_url"}, f"{PART}.image_url", "required"),
    ({"type": "image_url", "image_url": "x"}, f"{PART}.image_url", "object"),
    ({"type": "image_url", "image_url": {"url": 1}}, f"{PART}.image_url.url", "string"),
    ({"type": "image_url", "image_url": {"url": "x"}}, f"{PART}.image_url.url", "refused"),
    ({"type": "image_url", "image_url": {"url": "data:,"}}, f"{PART}.image_url.url", "data URL"),
    ({"type": "input_audio", "input_audio": {"data": "!"}}, f"{PART}.input_audio.data", "base64"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": 1}}, f"{PART}.input_audio", ""),
]


@pytest.mark.parametrize("index", range(len(WRONG_FIELDS) + len(WRONG_PARTS)))
def test_a_refusal_names_the_part_and_its_field(server, index, caplog) -> None:
    if index < len(WRONG_FIELDS):
        change, param, words = WRONG_FIELDS[index]
    else:
        part, param, words = WRONG_PARTS[index - len(WRONG_FIELDS)]
        content = [{"type": "text", "text": "a"}, part]
        change = {"messages": [{"role": "user", "content": content}]}
    with caplog.at_level("INFO", "qwen3_omni_neuron.serving"):
        with HttpClient(f"{url_of(server)}/v1") as client:
            answer = client.ask("/chat/completions", {**ASKED, **change})
        wait_until(lambda: any(r.getMessage() == "request" for r in caplog.records))
    error = answer.json()["error"]
    assert answer.status == 400, error
    assert error["param"].startswith(param), error
    assert words in error["message"], error
    assert error["message"].startswith(param), error
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert (line["param"], line["reason"]) == (error["param"], error["message"])


def test_a_misspelt_name_is_refused_with_the_one_that_it_may_mean(server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}
    audio = {"voyce": "Ethan", "format": "wav"}
    for path, change, meant in (
        ("chat/completions", {"temprature": 1}, "temperature"),
        ("chat/completions", {"thinker_tempature": 1}, "thinker_temperature"),
        ("chat/completions", {"audio": audio}, "voice"),
        ("chat/completions", {"audio": {"voice": "ehtan", "format": "wav"}}, "Ethan"),
        ("chat/completions", {"response_format": schema}, "schema"),
        ("chat/completions", {"model": server.service.model.name[1:]}, server.service.model.name),
        ("responses", {"input": "a", "instuctions": "b"}, "instructions"),
        ("responses", {"input": "a", "text": {"formt": {}}}, "format"),
        ("completions", {"prompt": "a", "max_token": 3}, "max_tokens"),
        ("audio/speech", {"input": "a", "voice": "alloi"}, "alloy"),
        (
            "audio/speech",
            {"input": "a", "voice": "alloy", "respnse_format": "mp3"},
            "response_format",
        ),
    ):
        body = {**ASKED, **change} if path == "chat/completions" else change
        error = ask(f"{url_of(server)}/v1/{path}", body).json()["error"]
        assert f" Did you mean {meant}?" in error["message"], error
        assert "?." not in error["message"], error
    form_data, headers = form({"promt": b"a"}, WAV[:20_044])
    answer = ask(f"{url_of(server)}/v1/audio/transcriptions", form_data, headers=headers)
    assert " Did you mean prompt?" in answer.json()["error"]["message"]


def test_no_file_is_opened_and_no_name_looked_up_for_a_request(server) -> None:
    opened: list[Any] = []
    watched = ("open", "socket.getaddrinfo", "socket.connect", "subprocess.Popen", "os.listdir")
    watching = threading.Event()

    def watch(event: str, arguments: Any) -> None:
        ours = threading.current_thread() is not threading.main_thread()  # that is the client
        if ours and watching.is_set() and event in watched:
            opened.append((event, str(arguments[:2])))

    sys.addaudithook(watch)
    urls = ("/etc/passwd", "file:///etc/passwd", "http://example.org/x", "http://169.254.169.254/")
    bodies = [
        json.dumps({**ASKED, "messages": [{"role": "user", "content": [part_of(k, url, "")]}]})
        for k in ("audio", "image", "video")
        for url in urls
    ]
    watching.set()
    for body in bodies:
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(len(body)) + body.encode())
            assert status_of(sock.recv(1 << 16)) == 400
    watching.clear()
    assert opened == []
