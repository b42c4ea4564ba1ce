"""One HTTP request: sender, body, and log fields."""

import time
from dataclasses import dataclass, field
from typing import Any

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.events import SpeechResult
from qwen3_omni_neuron.serving.edge.quotas import Account, Place
from qwen3_omni_neuron.serving.openai.errors import ApiError

SERVER_ERRORS = 500  # first HTTP status of the server's own errors
MOST_REASON = 500  # characters of a refusal's message in the log
BODY_COPIES = 3
"""A body, its parsed strings, and its media's bytes are in memory together."""


@dataclass
class Context:
    """State of one request from its headers to its last byte.

    owner: name of its key or address. session: a client secret's initial settings of a realtime
    session. origin: a page's on another host, if it may read the answer. omni: a POST's model,
    ready when the headers arrived. account: reserved bytes; absent for a path without an owner.
    place: among running requests. body: empty once released. param: field with the model's input.
    warnings: sentences about files that are used partly or unexpectedly, for the header
    `x-warnings`. question, answer: texts, if the log has content.
    """

    request_id: str
    method: str
    path: str
    owner: str = ""
    session: dict[str, Any] = field(default_factory=dict)
    origin: str | None = None
    omni: Qwen3Omni = field(init=False)
    account: Account = field(init=False)
    place: Place = field(init=False)
    body: bytes = b""
    status: int = 0
    error: str | None = None
    started_s: float = field(default_factory=time.perf_counter)
    fields: dict[str, Any] = field(default_factory=dict)
    param: str = "messages"
    warnings: list[str] = field(default_factory=list)
    refusal: ApiError | None = None
    question: Any = None
    answer: str | None = None

    def refused(self, refusal: ApiError) -> None:
        """Record the client's error."""
        # Its frames, with the body, would form a reference cycle.
        refusal.__traceback__ = refusal.__context__ = None
        self.error, self.refusal = refusal.code, refusal

    def release_body(self) -> None:
        """Drop the parsed body."""
        self.account.release(BODY_COPIES * len(self.body))
        self.body = b""

    def wanted(self, stream: bool, speaks: bool) -> None:
        """Record what the client requested."""
        self.fields |= {"stream": stream, "speech": speaks}

    def finished(self, result: SpeechResult) -> None:
        """Record the reply, without its text."""
        timings = result.timings
        self.fields |= {
            "queued_s": round(timings.queued_s, 4),
            "ttft_s": round(timings.ttft_s, 4),
            "ttfb_s": None if timings.ttfb_s is None else round(timings.ttfb_s, 4),
            "audio_s": round(timings.audio_s, 3),
            "prompt_tokens": timings.prompt_tokens,
            "text_tokens": timings.text_tokens,
            "frames": timings.frames,
            "finish": result.thinker_finish_reason,
            "speech_finish": result.talker_finish_reason,
        }

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the request's log line."""
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "owner": self.owner,
            "status": self.status,
            "error": self.error,
            **self._reason(),
            "seconds": round(time.perf_counter() - self.started_s, 4),
            **self.fields,
            "warnings": self.warnings or None,
            "question": self.question,
            "answer": self.answer,
        }

    def _reason(self) -> dict[str, Any]:
        if self.refusal is None or self.refusal.status >= SERVER_ERRORS:
            return {}
        return {"param": self.refusal.param, "reason": self.refusal.message[:MOST_REASON]}
