"""The choice of a replica for a request: by its session, within bounds of load.

Ray builds a router in every process that sends requests: in its proxies, and, for the sake of what
it is told, in each replica (`serving.fleet.draining`).
"""

import random

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class AffinityRouter(ConsistentHashRouter):
    """Ray's consistent hash of a session's id, with two additions.

    A request without an id goes to the less busy of two replicas. One whose replicas on the ring
    are all busy (at `max_ongoing_requests`) goes to the less busy of any two.
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
        """Take the replicas that run now."""
        # Here, since Ray may copy this class by value: a global of this module would not be shared.
        from qwen3_omni_neuron.serving.fleet.draining import PRESENCE

        if PRESENCE.tell({replica.replica_id.unique_id for replica in replicas}):
            # This process sends no requests, and need not ask each replica for its queue.
            self._replicas = {replica.replica_id: replica for replica in replicas}
        else:
            super().update_replicas(replicas)
