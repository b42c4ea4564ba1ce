"""Choice of a replica for a request: by its session, within limits of load.

Ray builds a router in every process that sends requests: in its proxies, and in each replica, which
needs the list of running replicas (`serving.fleet.draining`).
"""

import random

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class AffinityRouter(ConsistentHashRouter):
    """Ray's consistent hash of a session's id, with two additions.

    A request without an id goes to the less busy of two replicas. If all of its replicas on the
    ring are busy (at `max_ongoing_requests`), a request goes to the less busy of any two.
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
        # Imported here: Ray may copy this class by value, which would not share a module's global.
        from qwen3_omni_neuron.serving.fleet.draining import PRESENCE

        if PRESENCE.tell({replica.replica_id.unique_id for replica in replicas}):
            # A replica sends no requests, and need not ask each replica for its queue length.
            self._replicas = {replica.replica_id: replica for replica in replicas}
        else:
            super().update_replicas(replicas)
