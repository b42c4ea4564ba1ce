"""The application that a Serve YAML names as `import_path`: a model's replicas in Ray."""

import asyncio
import os
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import metrics
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.compilation.loading import resolve_model
from qwen3_omni_neuron.compilation.tree import needed_cores
from qwen3_omni_neuron.errors import ExitStatus
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.app import make_app
from qwen3_omni_neuron.serving.endpoints.response_api import SESSION_KEY
from qwen3_omni_neuron.serving.fleet.affinity import SESSION_HEADER, is_session_key
from qwen3_omni_neuron.serving.fleet.cores import RESOURCE, stage_cores
from qwen3_omni_neuron.serving.fleet.router import PRESENCE
from qwen3_omni_neuron.serving.fleet.scaling import ReplicaFigures
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings
from qwen3_omni_neuron.serving.model import FAILED_DRAIN_S, load_and_answer
from qwen3_omni_neuron.serving.service import Service

DEPLOYMENT = "replica"
"""Name of an application's only deployment in its YAML's `deployments`."""
MOST_QUEUED = 256  # requests that wait in one proxy
ATTEMPTS = 3  # to start a replica before its deployment fails
AFTER_DRAINING_S = 30.0  # from the end of the last session to a kill
FIGURES_S = 2.0  # interval between copies of the metrics
_REQUEST_ID = b"x-request-id"


@serve.ingress()
class Replica:
    """A model and its endpoints, ready for Ray after one reply.

    It drains when it leaves Ray's list of running replicas: it refuses new realtime sessions, ends
    open ones, and completes all requests, even late ones.
    """

    # Ray awaits `__init__`.
    async def __init__(self, settings: FleetSettings):  # type: ignore[misc]
        """Load the model. Raises its errors, and OptionError for cores that don't fit."""
        logs.log_to_stderr("info")
        self._loop = asyncio.get_running_loop()
        self._service = Service(settings.server_settings())
        self._service.decoder.start()
        self._load = ReplicaFigures(self._service.metrics.registry)
        load = settings.load_arguments(self._cores(settings))
        model = await self._loop.run_in_executor(None, partial(load_and_answer, **load))
        self._service.model.loaded(self._service.checked(model))
        context = serve.get_replica_context()
        PRESENCE.watch(context.replica_tag, self._on_change)
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        self._own = own.options()  # creates the handle's router
        beside = (self._copy_metrics(), self._service.model.watch())
        self._beside = [asyncio.create_task(task) for task in beside]
        logs.event("ready", model=self._service.model.name, replica=context.replica_tag)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _behind_proxy(make_app(self._service), serve.get_replica_context().replica_tag)

    async def check_health(self) -> None:
        """Raise RuntimeError if this replica must be replaced. Ray calls it."""
        if self._service.model.fault is not None:
            raise RuntimeError(self._service.model.fault)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `serving.fleet.scaling`. Ray calls it."""
        return self._load.read()

    async def __del__(self) -> None:
        """End the model. Ray calls it once no request runs."""
        for task in getattr(self, "_beside", ()):
            task.cancel()
        if hasattr(self, "_service"):
            await self._service.decoder.close()
            self._service.close()

    def _cores(self, settings: FleetSettings) -> dict[str, str] | None:
        given = ray.get_runtime_context().get_accelerator_ids().get(RESOURCE, [])
        # Ray lists all the replica's cores there; each stage's process gets its range.
        os.environ.pop("NEURON_RT_VISIBLE_CORES", None)
        tree, cores = settings.load.compiled_path, [int(core) for core in given]
        config = read_config(resolve_model(settings.model, settings.load))
        stages = STAGES if config.talker is not None else STAGES[:1]
        needed = {} if tree is None else needed_cores(tree, stages)
        return stage_cores(cores, settings.neuron_cores, settings.load.placement, needed)

    def _on_change(self, listed: bool) -> None:
        model = self._service.model
        self._loop.call_soon_threadsafe(model.keep_sessions if listed else self._leave)

    def _leave(self) -> None:
        model, seconds = self._service.model, self._service.settings.drain_timeout_s
        logs.event("draining", most_s=seconds, fault=model.fault)
        model.end_sessions(seconds)
        if model.fault is not None:  # Ray would wait for unanswered requests
            self._loop.call_later(FAILED_DRAIN_S, os._exit, ExitStatus.MODEL_DIED)

    async def _copy_metrics(self) -> None:
        """Forever copy all samples to Ray gauges, which every node exposes to Prometheus.

        Ray adds the prefix `ray_` and the labels application, deployment and replica. Gauges,
        because Ray's counters and histograms can't be set.
        """
        gauges: dict[str, metrics.Gauge] = {}
        while True:
            for family in self._service.metrics.registry.collect():
                for sample in family.samples:
                    if sample.name.endswith("_created"):
                        continue
                    if sample.name not in gauges:
                        made = metrics.Gauge(sample.name, family.documentation, (*sample.labels,))
                        gauges[sample.name] = made
                    gauges[sample.name].set(sample.value, dict(sample.labels))
            await asyncio.sleep(FIGURES_S)


def _behind_proxy(app: ASGIApp, replica: str) -> ASGIApp:
    """Return an application behind a Ray proxy: without route prefix, with the proxy's ids.

    Responses' ids have the session's key, by which the proxy routes later requests. Answers have
    the replica's name in the header x-replica.
    """

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        changed: dict[str, Any] = {**scope, "path": path, "root_path": ""}
        for name, value in scope["headers"]:
            if name == _REQUEST_ID:
                changed["request_id"] = value.decode("latin-1")
            elif name == SESSION_HEADER and is_session_key(value.decode("latin-1")):
                changed[SESSION_KEY] = value.decode("latin-1")

        async def named(message: Message) -> None:
            if message["type"].endswith(("http.response.start", "websocket.accept")):
                # The proxy itself adds the header with the id.
                kept = [pair for pair in message.get("headers", ()) if pair[0] != _REQUEST_ID]
                message = {**message, "headers": [*kept, (b"x-replica", replica.encode())]}
            await send(message)

        await app(changed, receive, named)

    return inner


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for the settings in `args` (see FleetSettings).

    Options of `replica` in the YAML's `deployments`, such as num_replicas or autoscaling_config,
    override those set here. Raises OptionError.
    """
    settings = FleetSettings.parse(args)
    resources = {RESOURCE: settings.neuron_cores} if settings.neuron_cores else {}
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": settings.load.threads or 1, "resources": resources},
        # No queue in a replica: requests wait in proxies for the first free replica.
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
