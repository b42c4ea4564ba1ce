"""The news that a replica is going: Ray tells it to routers, not to the replica.

Ray waits until a replica that it stops has no requests, and calls nothing of it before. A realtime
session is a request without an end, so that the replica has to know. The list of running replicas,
which Ray sends to the routers of every process, is the one public sign: a handle of the replica to
its own deployment has a router, and that router's list loses the replica when it is to go.
"""

from collections.abc import Callable


class Presence:
    """The presence of this process's replica on Ray's list of running replicas."""

    def __init__(self) -> None:
        self._replica: str | None = None
        self._on_change: Callable[[bool], None] | None = None
        self._listed = False

    def watch(self, replica: str, on_change: Callable[[bool], None]) -> None:
        """Call a function with whether a replica is on the list, each time that this changes.

        on_change: called in a thread of Ray's. Until the replica is on it first, it only starts.
        """
        self._replica, self._on_change, self._listed = replica, on_change, False

    def tell(self, running: set[str]) -> bool:
        """Take the list of now. Returns whether this process is a replica."""
        if self._on_change is None:
            return False
        listed = self._replica in running
        if listed != self._listed:
            self._listed = listed
            self._on_change(listed)
        return True


PRESENCE = Presence()
"""Presence of the one replica that a process of Ray's may be."""
