"""Ray Serve's own routing ring and autoscaling delays, without a cluster."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from testing.command_line import InputError

try:
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.autoscaling_policy import _apply_delay_logic
    from ray.serve.config import AutoscalingConfig

    from qwen3_omni_neuron.serving.fleet.router import AffinityRouter
except ImportError as error:
    raise InputError(
        f"the ring and the delays are Ray's, which can't be imported: {error}. "
        "Install the extra: pip install '.[ray]'."
    ) from error

_DEPLOYMENT = DeploymentID("fleet", "simulated")


class RayRing:
    """Ray's ring of `serving.fleet.router`, which ranks replicas without a cluster."""

    def __init__(self, **settings: Any):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # else a line for each change
        self._router = AffinityRouter.__new__(AffinityRouter)
        self._router._deployment_id = _DEPLOYMENT
        self._router.initialize_state(**settings)

    def update(self, names: Iterable[str]) -> None:
        """Set the replicas."""
        ids = frozenset(ReplicaID(name, _DEPLOYMENT) for name in names)
        self._router._rebuild_ring(ids)

    def rank(self, key: str) -> Sequence[str]:
        """Return the replicas that are tried in turn."""
        return [found.unique_id for found in self._router._lookup_ranked_replicas(key)]


class RayDelays:
    """Ray's delays before growing and shrinking, by default 30 s and 10 minutes."""

    def __init__(self, **settings: Any):
        self._config, self._state = AutoscalingConfig(**settings), dict[str, Any]()

    def __call__(self, wanted: int, target: int, now: float) -> int:
        """Return the new target."""
        settled, self._state = _apply_delay_logic(wanted, target, self._config, self._state, now)
        return int(settled)
