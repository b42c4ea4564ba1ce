"""Clients that ask a fleet without end, while its replicas die, go and are replaced."""

import base64
import io
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import openai
import soundfile
from numpy.typing import NDArray
from openai import OpenAI

from qwen3_omni_neuron.events.encoding import samples_of_pcm16
from train.judge import Judge

# What the shipped checkpoint answers to each question.
QUESTIONS = (
    ("say three five", "three five"),
    ("please say red goodbye ethan yellow", "red goodbye ethan yellow"),
    ("what is two plus four", "six"),
    ("say seven seven blue", "seven seven blue"),
)
ERRORS = (openai.APIError, httpx2.HTTPError)  # errors of OpenAI's client; the second in mid-stream
RETRIES = 10  # retries of OpenAI's client, each after at most 8 seconds


@dataclass
class Answer:
    """One answer: when it was asked, began and ended; what it said; the error that ended it.

    rows: KV rows of its prompt; cached_rows: those of them in its replica's prefix cache.
    """

    streamed: bool
    wanted: str
    asked_s: float
    began_s: float = 0.0
    ended_s: float = 0.0
    text: str = ""
    samples: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    rows: int = 0
    cached_rows: int = 0
    error: str | None = None


class Load:
    """Clients of one application, each in a thread. Use it in a `with` block.

    answers: all answers so far, in the order in which they ended. moments: what was done to the
    fleet, and when.
    """

    def __init__(self, client: Callable[[], OpenAI], clients: int):
        self.answers: list[Answer] = []
        self.moments: list[tuple[str, float]] = []
        self._client = client
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def between(self, moment: str) -> list[Answer]:
        """Return the answers that ended after a moment, and before the next one."""
        start_s = next(at_s for name, at_s in self.moments if name == moment)
        end_s = min((at_s for _, at_s in self.moments if at_s > start_s), default=float("inf"))
        return [one for one in self.answers if start_s <= one.ended_s < end_s]

    def note(self, moment: str) -> float:
        """Note what is done to the fleet now; return the time."""
        self.moments.append((moment, time.monotonic()))
        return self.moments[-1][1]

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        with self._client() as client:
            model = client.models.list().data[0].id
            while not self._end.is_set():
                words, wanted = draw.choice(QUESTIONS)
                answer = Answer(draw.random() < 0.5, wanted, time.monotonic())
                try:
                    _hear(client, model, words, answer, f"client {number}")
                except ERRORS as error:
                    answer.error = f"{type(error).__name__}: {error}"
                answer.ended_s = time.monotonic()
                self.answers.append(answer)


def _hear(client: OpenAI, model: str, words: str, answer: Answer, cache_key: str) -> None:
    """Ask and take the answer. cache_key: the client's key, whose replica keeps its rows."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "modalities": ["text", "audio"],
        "seed": 0,
        "extra_headers": {"x-session-id": cache_key},
        "extra_body": {"talker_max_new_tokens": 100, "cache_key": cache_key},
    }
    create: Any = client.chat.completions.create
    if not answer.streamed:
        sound = {"voice": "Ethan", "format": "wav"}
        whole = create(**asked, audio=sound)
        answer.began_s = time.monotonic()
        _count(answer, whole.usage)
        audio = whole.choices[0].message.audio
        answer.text = audio.transcript
        data = io.BytesIO(base64.b64decode(audio.data))
        answer.samples, _ = soundfile.read(data, dtype="float32")
        return
    sound = {"voice": "Ethan", "format": "pcm16"}
    parts: list[bytes] = []
    options = {"include_usage": True}
    for piece in create(**asked, audio=sound, stream=True, stream_options=options):
        answer.began_s = answer.began_s or time.monotonic()
        if piece.usage is not None:  # the last piece, which has only the usage
            _count(answer, piece.usage)
            continue
        audio = piece.choices[0].delta.audio
        answer.text += (audio and audio.transcript) or ""
        parts.append(base64.b64decode((audio and audio.data) or ""))
    answer.samples = samples_of_pcm16(b"".join(parts))


def _count(answer: Answer, usage: Any) -> None:
    answer.rows = usage.prompt_tokens
    answer.cached_rows = usage.prompt_tokens_details.cached_tokens


def failed(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers that got an error before they began, which no answer may."""
    return [one for one in answers if one.error is not None and not one.began_s]


def cut(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers that an error ended in the middle."""
    return [one for one in answers if one.error is not None and one.began_s]


def wrong(answers: Sequence[Answer], judge: Judge, sample: int) -> list[tuple[str, str, str]]:
    """Return the expected, written and heard texts of wrong answers.

    All texts are read; `sample` of them, evenly spread, are heard.
    """
    whole = [one for one in answers if one.error is None]
    found = [(one.wanted, one.text, "") for one in whole if one.text != one.wanted]
    for one in whole[:: max(1, len(whole) // sample)]:
        heard = " ".join(word.word for word in judge.hear(one.samples))
        if heard != one.wanted:
            found.append((one.wanted, one.text, heard))
    return found
