"""Errors in OpenAI's format: a status, and a body with advice."""

import json
import re
from collections.abc import Sequence
from typing import Any

from qwen3_omni_neuron.errors import (
    AudioError,
    BusyError,
    ClosedError,
    EngineDiedError,
    GrammarError,
    ImageError,
    InputError,
    LateError,
    MessageError,
    NotInstalledError,
    PromptTooLongError,
    ToolCallError,
    VideoError,
)
from qwen3_omni_neuron.options import REQUEST_OPTIONS

RETRY_S = 1
_OPTIONS = "|".join(option.name for option in REQUEST_OPTIONS)
_OF_INPUT = (PromptTooLongError, AudioError, ImageError, VideoError, MessageError)
# Status and code; the first matching kind wins.
_KINDS: Sequence[tuple[type[Exception] | tuple[type[Exception], ...], int, str]] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    ((AudioError, ImageError, VideoError), 400, "invalid_media"),
    (InputError, 400, "invalid_value"),
    (GrammarError, 400, "grammar_too_complex"),
    (ToolCallError, 500, "tool_call_failed"),
    (NotInstalledError, 400, "not_installed"),
    (BusyError, 429, "queue_full"),
    (LateError, 503, "timeout"),
)


UNKNOWN = "unknown_parameter"
"""Code of the error for an unknown field."""


class ApiError(Exception):
    """A refusal or failure with an HTTP status.

    code: short name for programs. param: the request's wrong field. retry_after_s: seconds after
    which the request may succeed; None: never.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param, self.retry_after_s = param, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def json(self) -> bytes:
        """The body of its response."""
        return json.dumps(self.body).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the error's response."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"} if self.status >= 500 else {}
        return {"retry-after": str(self.retry_after_s)}


def wrong_value(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """Return the error for a field."""
    return ApiError(400, message, code, param)


def api_error_of(error: BaseException, param: str = "messages") -> ApiError:
    """Return the client's error for one of the package's errors.

    param: request field with the model's input, or the path or option at the message's beginning,
    such as messages[0].content[1].
    """
    if isinstance(error, ApiError):
        return error
    text = str(error)
    for kinds, status, code in _KINDS:
        if isinstance(error, kinds):
            path = rf"{re.escape(param)}(?:\[\d+\]|\.[a-z]\w*)+"
            found = re.match(rf"{path}|(?:{_OPTIONS})(?= )", text)
            field = param if isinstance(error, _OF_INPUT) else None
            field = found[0][:200] if found else field
            return ApiError(status, text, code, field, RETRY_S if status in (429, 503) else None)
    if isinstance(error, EngineDiedError | ClosedError):
        # The message has process ids and output for the log.
        message = "the model has ended. Send the request again later: the server restarts."
        return ApiError(503, message, "model_unavailable", retry_after_s=RETRY_S)
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        message = "the server has no more threads. Try again later."
        return ApiError(503, message, "no_threads", retry_after_s=RETRY_S)
    return ApiError(
        500,
        "the server failed. Its log says why, at this answer's x-request-id.",
        "internal_error",
    )


def error_event(error: ApiError) -> bytes:
    """Return an error as a server-sent event, for an answer already begun."""
    return b"data: " + error.json + b"\n\n"
