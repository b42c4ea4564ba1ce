"""The server's log on stderr: one line per event, in JSON or for people.

Texts of requests and replies are logged only with --log-content.
"""

import asyncio
import json
import logging
import re
import sys
import time
from typing import Any, Literal

logger = logging.getLogger("qwen3_omni_neuron.serving")
LogFormat = Literal["auto", "human", "json"]
_PLAIN = frozenset(vars(logging.makeLogRecord({})))
_NOT_FIELDS = _PLAIN | {"message", "color_message"}
# Other values are quoted: a client's text can't imitate fields.
_BARE = re.compile(r"[^\s\"=]+")
_INDENT = "    "
# Messages of uvicorn and websockets about refused sockets and invalid UTF-8.
_OF_SOCKETS = re.compile(
    r'%s - "WebSocket %s" (403|%d)|connection rejected \(%d %s\)'
    r"|ASGI callable returned without completing handshake\."
    r"|Invalid UTF-8 sequence received from client\."
)


class JsonFormatter(logging.Formatter):
    """Formatter of a log record as one line of JSON, with its `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with unprintable characters escaped."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _printable(_json(line))


class HumanFormatter(logging.Formatter):
    """Formatter of a log record as a line for people.

    A request's line begins with status, method, path and time, and ends with a refusal's reason.
    Tracebacks are indented, so that no text in them looks like an event.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with unprintable characters escaped."""
        fields = {name: v for name, v in _fields_of(record).items() if v is not None}
        words = [time.strftime("%H:%M:%S", time.localtime(record.created))]
        if record.levelno >= logging.WARNING:
            words.append(record.levelname)
        event = record.getMessage()
        reason = None
        if event == "request":
            if fields.get("error") == "client_left":
                fields["status"] = "left"  # as in the metrics
            words += [_shown(fields.pop(name)) for name in ("status", "method", "path")]
            words.append(f"{fields.pop('seconds')} s")
            reason = fields.pop("reason", None)
        else:
            words.append(event)
        words += [f"{name}={_shown(value)}" for name, value in fields.items()]
        lines = [" ".join(words) + (f": {reason}" if reason else "")]
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            lines += [_INDENT + line for line in traceback.splitlines()]
        return "\n".join(map(_printable, lines))


def log_to_stderr(level: str, form: LogFormat = "json") -> None:
    """Write the log of this package and of uvicorn to stderr.

    form: "auto": for people if stderr is a terminal, else JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    human = sys.stderr.isatty() if form == "auto" else form == "human"
    handler.setFormatter(HumanFormatter() if human else JsonFormatter())
    handler.addFilter(_is_news)
    for name in ("qwen3_omni_neuron", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level.upper())
    # The gate logs each request, with its id.
    logging.getLogger("uvicorn.access").disabled = True
    # It quotes clients' data; the client gets its error.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL + 1)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's records that repeat the gate's line.

    These are tracebacks of requests that the server's end cancelled, and ends of WebSockets.
    """
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return not _OF_SOCKETS.fullmatch(str(record.msg))


def event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields, except None."""
    logger.log(level, name, extra={k: v for k, v in fields.items() if v is not None})


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: v for name, v in vars(record).items() if name not in _NOT_FIELDS}


def _shown(value: Any) -> str:
    """Return a field's value, quoted if its end would be unclear."""
    text = str(value) if isinstance(value, str | int | float) else _json(value)
    return text if _BARE.fullmatch(text) else _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)


def _printable(line: str) -> str:
    """Return a line with unprintable characters escaped.

    Control characters and bidirectional overrides could deceive a terminal's reader; a lone
    surrogate can't be written.
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
