"""Detection that Ray stops a replica, which Ray tells routers but not the replica.

Ray waits until a replica that it stops has no requests, and calls no method of it before. A
realtime session is a request without an end, so that the replica has to know. The only public sign
is the list of running replicas that Ray sends to the routers of every process: a replica's handle
to its own deployment has a router, and that router's list loses the replica when Ray stops it.
"""

from collections.abc import Callable


class Presence:
    """Presence of this process's replica on Ray's list of running replicas."""

    def __init__(self) -> None:
        self._replica: str | None = None
        self._on_change: Callable[[bool], None] | None = None
        self._listed = False

    def watch(self, replica: str, on_change: Callable[[bool], None]) -> None:
        """Watch whether a replica is on the list.

        on_change: called with whether it is, at each change, in a Ray thread. A replica that has
        not been on the list yet is still starting.
        """
        self._replica, self._on_change, self._listed = replica, on_change, False

    def tell(self, running: set[str]) -> bool:
        """Process the current list. Returns whether this process is a replica."""
        if self._on_change is None:
            return False
        listed = self._replica in running
        if listed != self._listed:
            self._listed = listed
            self._on_change(listed)
        return True


PRESENCE = Presence()
"""Presence of this process's replica, if the process is one."""
