"""Exceptions that are sent from an engine's process to its caller."""

import pickle
import traceback
from dataclasses import dataclass


class EngineTracebackError(Exception):
    """Traceback of an exception in the engine's process, as text: its `__cause__` here."""


@dataclass(frozen=True)
class Failure:
    """An exception in a form that can be sent.

    pickled: the exception, None where it can't be pickled. summary: its type and message. text: its
    traceback.
    """

    pickled: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Make a failure of an exception that was caught."""
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        return cls(pickled, summary, "".join(traceback.format_exception(error)))

    def exception(self) -> Exception:
        """Return the exception, with the traceback of its process as `__cause__`.

        It has its own type, or is a RuntimeError that names that type where it can't be unpickled.
        """
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                error = None
        if not isinstance(error, Exception):
            error = RuntimeError(
                f"the engine's process raised what can't be sent to this one: {self.summary}"
            )
        error.__cause__ = EngineTracebackError(f"\n{self.text}")
        return error
