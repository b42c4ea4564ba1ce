"""The application that a Serve YAML names as its `import_path`."""

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from qwen3_omni_neuron.serving.fleet.cores import RESOURCE, check_nodes
from qwen3_omni_neuron.serving.fleet.replica import Replica
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings

DEPLOYMENT = "replica"
"""Name of the one deployment of an application, as its YAML's `deployments` names it."""
MOST_QUEUED = 256  # requests that wait in one proxy
ATTEMPTS = 3  # attempts to start a replica before its deployment has failed
AFTER_DRAINING_S = 30.0  # time between the end of the last session and a kill


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for the settings in `args` (see FleetSettings).

    Options of `replica` in the YAML's `deployments`, such as num_replicas or autoscaling_config,
    override the options set here. If a replica needs cores, this waits for a node that has cores.
    Raises OptionError if the settings can't be used, or if no node of the cluster has the cores
    that a replica needs.
    """
    settings = FleetSettings.parse(args)
    check_nodes(settings.neuron_cores, ray.nodes)
    resources = {RESOURCE: settings.neuron_cores} if settings.neuron_cores else {}
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": settings.load.threads or 1, "resources": resources},
        # No queue in a replica: requests wait in the proxies for the first free replica.
        max_ongoing_requests=settings.slots,
        max_queued_requests=MOST_QUEUED,
        backpressure_config={"retry_after_s": 1},
        graceful_shutdown_timeout_s=settings.drain_timeout_s + AFTER_DRAINING_S,
        max_constructor_retry_count=ATTEMPTS,
        request_router_config=RequestRouterConfig(
            request_router_class="qwen3_omni_neuron.serving.fleet.router:AffinityRouter"
        ),
    )
    return deployment.bind(settings)
