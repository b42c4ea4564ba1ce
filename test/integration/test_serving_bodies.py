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

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.endpoints.sound import wav_header
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import client_of, serving, url_of
from testing.media_cases import QUESTION_WAV
from testing.raw_http import (
    ASKED,
    connected,
    head_of,
    rest_of,
    status_of,
    still_answers,
)


@pytest.fixture(scope="module")
def server(omni: Qwen3Omni) -> Iterator[Server]:
    sizes = {"max_body_bytes": 400_000, "max_media_bytes": 200_000, "max_media": 3}
    with serving(omni, **sizes, max_media_s=20.0, max_pixels=500_000) as running:
        yield running


@pytest.mark.parametrize(
    "body",
    [
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
    ],
)
def test_a_body_that_makes_no_sense_is_a_4xx_in_openais_shape(server: Server, body: bytes) -> None:
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
    (part_of("audio", WAV, "text/html"), 400, "invalid_media_type"),
    (part_of("audio", WAV, "image/png"), 400, "invalid_media_type"),
    (part_of("image", b"GIF89a", "image/gif"), 400, "invalid_media"),
    (part_of("image", png_of(1000, 1000), "image/png"), 400, "media_too_large"),
    (part_of("image", png_of(60_000, 60_000), "image/png"), 400, "media_too_large"),
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
            "DATA:audio/wav;base64,AAAA",
            "",
        )
    ),
    ({"type": "audio", "audio": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image", "image": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image_url", "image_url": "data:image/png;base64,"}, 400, "invalid_value"),
    ({"type": "image_url"}, 400, "invalid_value"),
]


def test_bad_media_are_refused_each_in_its_way(server: Server) -> None:
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
            assert not re.search("root:| at 0x|/usr/|/home/", str(refused.value))
        four = [{"role": "user", "content": [part_of("audio", WAV[:20_044], "audio/wav")] * 4}]
        with pytest.raises(openai.BadRequestError, match="more than 3 media"):
            client.post("/chat/completions", body={**ASKED, "messages": four}, cast_to=object)
    still_answers(url_of(server))


def test_no_file_is_opened_and_no_name_looked_up_for_a_request(server: Server) -> None:
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
