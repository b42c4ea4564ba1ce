"""A thread that polls for processes that have ended by themselves."""

import logging
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # interval between two polls


class Watch:
    """Thread that calls functions every LOOK_S until it is closed; not started without functions.

    It waits in real time, not by a stage's clock, because processes end in real time.
    """

    def __init__(self, looks: Sequence[Callable[[], None]]):
        self._looks, self._closing = looks, threading.Event()
        self._thread = threading.Thread(target=self._run, name="qwen3-omni-watch", daemon=True)
        if looks:
            self._thread.start()

    @property
    def is_current(self) -> bool:
        """True in its own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the calls. Waits for a call in progress, unless it is called from there."""
        self._closing.set()
        if self._looks and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            for look in self._looks:
                try:
                    look()
                except Exception:
                    logger.exception("a look at what may end by itself has failed")
