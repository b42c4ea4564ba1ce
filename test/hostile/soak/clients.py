"""Clients of a soak, who ask and hear, speak, dictate, talk, vanish, and are refused."""

import base64
import io
import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.events.encoding import samples_of_pcm16
from test.hostile.soak.gate import Gate
from testing.fleet_load import QUESTIONS
from testing.http_client import JSON, HttpClient, ask, form
from testing.raw_http import CHAT, connected, head_of
from testing.websocket_client import append, opened, received, send

SPOKEN = Path(__file__).parents[3] / "examples" / "sum.wav"
ANSWER = "eight"  # the answer of the checkpoint that ships
SAID = ("three five seven", "blue goodbye", "seven white")
BAD: list[dict[str, Any]] = [
    {"messages": []},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/a"}}]}
        ]
    },
    {"audio": {"voice": "nobody"}},
    {"temperature": 9},
]
RATE = 16000
REPLY_S = 120.0
HEARD, HEARD_SHARE = 100, 0.05  # most answers whose sound is judged, and their share of all
SPEECH = "/v1/audio/speech"
TALKS = ("asks", "interrupts", "vanishes")
FORMATS = ("flac", "mp3", "opus")

Sound = NDArray[np.float32]
Action = Callable[[str, str, random.Random], str]


class Clients:
    """All clients of a soak, each with a thread and an address of its own.

    heard: some spoken answers, and what they should say. Lists' appends are atomic.
    """

    def __init__(self, gate: Gate, talkers: int, callers: int):
        self.heard: list[tuple[str, Sound]] = []
        self._gate = gate
        # What each client draws actions from, and the right outcome.
        self._calls: list[tuple[str, Action, str]] = [
            ("chat whole", self._whole, "right"),
            ("chat streamed", self._streamed, "right"),
            ("speech", self._speaks, "right"),
            ("transcription", self._dictates, "right"),
            ("leaves", self._leaves, "left"),
            ("leaves early", self._leaves_early, "left"),
            ("refused", self._refused, "refused"),
        ]
        self._talks: list[tuple[str, Action, str]] = [
            (f"realtime {kind}", partial(self._talk, kind), "done") for kind in TALKS
        ]
        self._clips: list[tuple[str, str, bytes]] = []
        kinds = ["talks"] * talkers + ["calls"] * callers
        self._threads = [
            threading.Thread(target=self._run, args=(kind, number))
            for number, kind in enumerate(kinds)
        ]

    def start(self, url: str) -> None:
        """Have the server speak the clips for dictation, and start."""
        for number, words in enumerate(SAID):
            name = FORMATS[number % len(FORMATS)]
            reply = ask(url + SPEECH, self._speech(words) | {"response_format": name})
            assert reply.status == 200, reply.body
            self._clips.append((words, f"a.{name}", reply.body))
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all clients, after the gate has ended."""
        for thread in self._threads:
            thread.join()

    def _run(self, kind: str, number: int) -> None:
        draw, source = random.Random(number), f"127.0.1.{1 + number % 250}"
        goes_on = True
        while goes_on:
            name, do, wanted = draw.choice(self._talks if kind == "talks" else self._calls)
            goes_on = self._gate.visit(name, bound(do, source, draw), wanted.__eq__)

    # Over HTTP

    def _whole(self, url: str, source: str, draw: random.Random) -> str:
        words, wanted = draw.choice(QUESTIONS)
        content: Any = words
        if draw.random() < 0.3:
            sound = base64.b64encode(SPOKEN.read_bytes()).decode()
            content = [{"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}]
            wanted = ANSWER
        body = _asked(content) | {"audio": {"voice": "Ethan", "format": "wav"}}
        reply = ask(url + CHAT, body, source=source)
        if reply.status != 200:
            return str(reply.status)
        audio = reply.json()["choices"][0]["message"]["audio"]
        self._keep(draw, wanted, _samples(base64.b64decode(audio["data"])))
        return _right(audio["transcript"], wanted)

    def _streamed(self, url: str, source: str, draw: random.Random) -> str:
        words, wanted = draw.choice(QUESTIONS)
        reply = ask(url + CHAT, _asked(words) | {"stream": True}, source=source)
        if reply.status != 200:
            return str(reply.status)
        text, sound = "", b""
        *_, last, done = [line for line in reply.body.splitlines() if line]
        if done != b"data: [DONE]" or b'"error"' in last:
            return "broke off"
        for line in reply.body.splitlines():
            if line.startswith(b"data: {"):
                audio = json.loads(line[6:])["choices"][0]["delta"].get("audio") or {}
                text += audio.get("transcript", "")
                sound += base64.b64decode(audio.get("data", ""))
        self._keep(draw, wanted, samples_of_pcm16(sound))
        return _right(text, wanted)

    def _speaks(self, url: str, source: str, draw: random.Random) -> str:
        words = draw.choice(SAID)
        reply = ask(url + SPEECH, self._speech(words), source=source)
        if reply.status != 200:
            return str(reply.status)
        self._keep(draw, words, _samples(reply.body))
        return "right"

    def _dictates(self, url: str, source: str, draw: random.Random) -> str:
        words, name, clip = draw.choice(self._clips)
        body, headers = form({"model": b"load"}, clip, name)
        reply = ask(f"{url}/v1/audio/transcriptions", body, headers, source=source)
        if reply.status != 200:
            return str(reply.status)
        return _right(reply.json()["text"], words)

    def _leaves(self, url: str, source: str, draw: random.Random) -> str:
        """Disconnect in the middle of an answer."""
        words, _ = draw.choice(QUESTIONS)
        path, asked = draw.choice(((CHAT, _asked(words) | {"stream": True}), self._any_speech))
        with HttpClient(url, source=source) as client:
            client.begin(path, asked).read(draw.randrange(20_000))
        return "left"

    def _leaves_early(self, url: str, source: str, draw: random.Random) -> str:
        """Disconnect before the request is complete, or right after it."""
        path, data, headers = CHAT, json.dumps(_asked(QUESTIONS[0][0])).encode(), JSON
        if draw.random() < 0.3:
            path = "/v1/audio/transcriptions"
            _, name, clip = self._clips[0]
            data, headers = form({"model": b"load"}, clip, name)
        with connected(url, REPLY_S, source=source) as sock:
            sock.sendall(head_of(len(data), path, headers) + data[: draw.randrange(len(data) + 1)])
            time.sleep(draw.random() / 20)
        return "left"

    def _refused(self, url: str, source: str, draw: random.Random) -> str:
        body = _asked("hello") | draw.choice(BAD)
        return "refused" if 400 <= ask(url + CHAT, body, source=source).status < 500 else "not"

    _any_speech = (SPEECH, {"model": "load", "voice": "Ethan", "input": SAID[0], "seed": 0})

    @staticmethod
    def _speech(words: str) -> dict[str, Any]:
        asked = {"model": "load", "voice": "Ethan", "input": words, "seed": 0}
        return asked | {"response_format": "wav"}

    # Over /v1/realtime

    def _talk(self, kind: str, url: str, source: str, draw: random.Random) -> str:
        """Ask in speech, sent as fast as possible, once or a few times.

        An answer is short and equals ANSWER, unless it was interrupted.
        """
        samples, _ = soundfile.read(SPOKEN, dtype="float32")
        silence = np.zeros(RATE, np.float32)
        sound = {"format": {"type": "audio/pcm", "rate": RATE}}
        with opened(url, source_address=(source, 0)) as socket:
            session = {"type": "realtime", "audio": {"input": sound}, "seed": 0}
            send(socket, "session.update", session=session)
            for number in range(draw.randrange(1, 4)):
                append(socket, np.concatenate((silence, samples, silence)))
                deltas: list[str] = []
                interrupts = kind == "interrupts" and not number
                while True:
                    event = received(socket, REPLY_S)
                    if event["type"] == "error":
                        return f"error {event['error']['code']}"
                    if event["type"] == "response.done":
                        break
                    if event["type"] == "response.output_audio.delta":
                        deltas.append(event["delta"])
                    if kind == "vanishes" and deltas and draw.random() < 0.5:
                        socket.close_socket()
                        return "done"
                    if interrupts and deltas:
                        append(socket, np.concatenate((samples, silence)))
                        interrupts = False
                response = event["response"]
                if kind != "asks":
                    continue
                output = response["output"]
                said = output[0]["content"][0]["transcript"] if output else ""
                if response["status"] != "completed":
                    return str(response["status"])
                if said != ANSWER:
                    return f"answered {said[:40]!r}"
                self._keep(draw, ANSWER, samples_of_pcm16(b"".join(map(base64.b64decode, deltas))))
        return "done"

    def _keep(self, draw: random.Random, wanted: str, samples: Sound) -> None:
        """Keep some of the answers, to judge their sound."""
        if len(self.heard) < HEARD and draw.random() < HEARD_SHARE:
            self.heard.append((wanted, samples))


def bound(do: Action, source: str, draw: random.Random) -> Callable[[str], str]:
    return lambda url: do(url, source, draw)


def _asked(content: Any) -> dict[str, Any]:
    return {
        "model": "load",
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "seed": 0,
        "talker_max_new_tokens": 100,
    }


def _right(text: str, wanted: str) -> str:
    return "right" if text == wanted else f"{text[:40]!r} for {wanted!r}"


def _samples(wav: bytes) -> Sound:
    return soundfile.read(io.BytesIO(wav), dtype="float32")[0]
