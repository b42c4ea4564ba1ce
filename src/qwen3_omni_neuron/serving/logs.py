"""The server's log on stderr: one line of JSON per event, with content only if requested."""

import asyncio
import json
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("qwen3_omni_neuron.serving")
_PLAIN = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """Formatter of a log record as one line of JSON, with its `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with escapes for what is not printable.

        Control characters and bidirectional overrides of a stranger would change what a terminal
        shows; a lone surrogate can't be written.
        """
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {name: v for name, v in vars(record).items() if name not in _PLAIN}
        line.pop("message", None)
        line.pop("color_message", None)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def log_to_stderr(level: str) -> None:
    """Write the log of this package and of uvicorn to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(_is_news)
    for name in ("qwen3_omni_neuron", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level.upper())
    # The gate logs each request instead, with its id.
    logging.getLogger("uvicorn.access").disabled = True
    # It quotes what a client has sent; the client gets the error that it raises.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL + 1)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's traceback of a request that the server's end has cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields, without those that are None."""
    logger.log(level, name, extra={k: v for k, v in fields.items() if v is not None})
