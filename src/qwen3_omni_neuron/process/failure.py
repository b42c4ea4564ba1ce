"""An exception on its way from an engine's process to the one that called."""

import pickle
import traceback
from dataclasses import dataclass


class EngineTracebackError(Exception):
    """The traceback of an exception in the engine's process, as text: its `__cause__` here."""


@dataclass(frozen=True)
class Failure:
    """pickled: the exception, None where it can't be pickled. summary: its type and message.
    text: its traceback."""

    pickled: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        return cls(pickled, summary, "".join(traceback.format_exception(error)))

    def exception(self) -> Exception:
        """The exception with its own type; a RuntimeError that names it where this process can't
        make one of it."""
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                error = None
        if not isinstance(error, Exception):
            error = RuntimeError(
                f"in the engine's process, and of a type kept there: {self.summary}"
            )
        error.__cause__ = EngineTracebackError(f"\n{self.text}")
        return error
