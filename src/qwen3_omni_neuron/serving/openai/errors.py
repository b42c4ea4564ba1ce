"""Errors in the format of OpenAI's API: a status, and a body that says what to do."""

import json
import re
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

RETRY_S = 1


class ApiError(Exception):
    """A refusal or failure with an HTTP status.

    code: short name for programs. param: field of the request that is wrong. retry_after_s: seconds
    after which the same request may succeed; None: never.
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
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
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


def wrong_value(message: str, param: str | None) -> ApiError:
    """Return the error for a field's value."""
    return ApiError(400, message, "invalid_value", param)


def api_error_of(error: BaseException, param: str = "messages") -> ApiError:
    """Return the error that a client gets for one of the package's errors.

    param: name of the request's field with the model's input. A message that begins with a path in
    it, such as messages[0].content[1], is about that path.
    """
    if isinstance(error, ApiError):
        return error
    if found := re.match(rf"{re.escape(param)}(?:\[\d+\]|\.[a-z]\w*)+", str(error)):
        param = found[0][:200]
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), "context_length_exceeded", param)
    if isinstance(error, AudioError | ImageError | VideoError):
        return ApiError(400, str(error), "invalid_media", param)
    if isinstance(error, MessageError):
        return wrong_value(str(error), param)
    if isinstance(error, InputError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), "grammar_too_complex")
    if isinstance(error, ToolCallError):
        return ApiError(500, str(error), "tool_call_failed")
    if isinstance(error, NotInstalledError):
        return ApiError(400, str(error), "not_installed")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "queue_full", retry_after_s=RETRY_S)
    if isinstance(error, LateError):
        return ApiError(503, str(error), "timeout", retry_after_s=RETRY_S)
    if isinstance(error, EngineDiedError | ClosedError):
        # The error's own message is for the log: process ids, and a dying process's last output.
        message = "the model has ended. The request may be sent again: the server starts anew."
        return ApiError(503, message, "model_unavailable", retry_after_s=RETRY_S)
    return ApiError(
        500,
        "the server failed. Its log says why, under the x-request-id of this answer.",
        "internal_error",
    )


def error_event(error: ApiError) -> bytes:
    """Return an error as a server-sent event, for an answer already begun."""
    return b"data: " + error.json + b"\n\n"
