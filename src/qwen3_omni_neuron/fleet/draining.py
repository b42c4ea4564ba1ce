"""The news that a replica is going: Ray tells it to routers, not to the replica.

Ray waits until a replica that it stops has no requests, and calls nothing of it before. A realtime
session is a request without an end, so that the replica has to know. The list of running replicas,
which Ray sends to the routers of every process, is the one public sign: a handle of the replica to
its own deployment has a router, and that router's list loses the replica when it is to go.
"""

from collections.abc import Callable

_watching: tuple[str, Callable[[], None]] | None = None
_listed = False


def watch(replica: str, on_leaving: Callable[[], None]) -> None:
    """Call a function once a replica that has been on the list is on it no more.

    on_leaving: called in a thread of Ray's. One replica a process.
    """
    global _watching, _listed  # noqa: PLW0603
    _watching, _listed = (replica, on_leaving), False


def tell(running: set[str]) -> bool:
    """Take the list of replicas that run now. Returns whether this process is a replica."""
    global _listed  # noqa: PLW0603
    if _watching is None:
        return False
    replica, on_leaving = _watching
    if _listed and replica not in running:
        on_leaving()
    _listed = replica in running
    return True
