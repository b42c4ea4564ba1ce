"""Memory of an idle server: what malloc keeps of the requests before goes back to the system."""

import asyncio
import time
from collections.abc import Callable

from qwen3_omni_neuron.heap import give_back

LOOK_S = 5.0  # between two looks
GROWN_MB = 8  # less is not worth a look through malloc's arenas


class IdleMemory:
    """Look at this process's memory while no request runs, for one event loop.

    resident_mb: returns what the process holds, None where the system does not say. free: gives
    back what malloc keeps.
    """

    def __init__(
        self,
        resident_mb: Callable[[], int | None],
        free: Callable[[], None] = give_back,
        now: Callable[[], float] = time.monotonic,
    ):
        self._resident_mb, self._free, self._now = resident_mb, free, now
        self._next_s = 0.0
        self._kept_mb = 0

    async def look(self) -> None:
        """Give memory back where there is more of it than after the last time."""
        if self._now() < self._next_s:
            return
        self._next_s = self._now() + LOOK_S
        held_mb = self._resident_mb()
        if held_mb is None:
            return
        self._kept_mb = min(self._kept_mb, held_mb)
        if held_mb < self._kept_mb + GROWN_MB:
            return
        await asyncio.get_running_loop().run_in_executor(None, self._free)
        self._kept_mb = self._resident_mb() or held_mb
