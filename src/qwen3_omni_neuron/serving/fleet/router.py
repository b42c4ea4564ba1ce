"""Choice of a request's replica by its session, within limits of load.

Ray builds a router in its proxies and replicas. It stops a replica after its last request without
notice, and a realtime session is an endless request. The only public sign is every router's list of
running replicas, which loses the replica.
"""

import random
from collections.abc import Callable
from importlib import import_module

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

_MODULE = "qwen3_omni_neuron.serving.fleet.router"


class Presence:
    """Presence of this process's replica on Ray's list of running replicas."""

    def __init__(self) -> None:
        self._replica: str | None = None
        self._on_change: Callable[[bool], None] | None = None
        self._listed = False

    def watch(self, replica: str, on_change: Callable[[bool], None]) -> None:
        """Call on_change in a Ray thread whenever a replica joins or leaves the list."""
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
"""Presence of this process's replica, if it is one."""


class AffinityRouter(ConsistentHashRouter):
    """Ray's consistent hash of a session's id, with two additions.

    A request without an id, or whose replicas on the ring are all busy (at `max_ongoing_requests`),
    goes to the less busy of two replicas.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred ones first."""
        if not candidate_replicas:
            return []
        any_two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is not None and not pending_request.metadata.session_id:
            pending_request.routing_context.should_backoff = True
            return [any_two]
        return [*await super().choose_replicas(candidate_replicas, pending_request), any_two]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the running replicas."""
        # By the module's name: Ray may copy this class by value, which shares no globals.
        presence: Presence = import_module(_MODULE).PRESENCE
        if presence.tell({replica.replica_id.unique_id for replica in replicas}):
            # A replica sends no requests: it needs no queue lengths.
            self._replicas = {replica.replica_id: replica for replica in replicas}
        else:
            super().update_replicas(replicas)
