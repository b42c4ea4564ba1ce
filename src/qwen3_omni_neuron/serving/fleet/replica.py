"""One replica: a loaded model behind the application of `serving`, in a Ray actor."""

import asyncio
import os
from functools import partial
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve import metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.compilation.tree import needed_cores
from qwen3_omni_neuron.errors import ExitStatus
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.app import make_app
from qwen3_omni_neuron.serving.endpoints.response_api import SESSION_KEY
from qwen3_omni_neuron.serving.fleet.affinity import is_session_key, session_header
from qwen3_omni_neuron.serving.fleet.cores import RESOURCE, stage_cores
from qwen3_omni_neuron.serving.fleet.draining import PRESENCE
from qwen3_omni_neuron.serving.fleet.scaling import ReplicaFigures
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings
from qwen3_omni_neuron.serving.model import FAILED_DRAIN_S, load_and_answer
from qwen3_omni_neuron.serving.service import Service

FIGURES_S = 2.0  # interval between copies of the metrics
_REQUEST_ID = b"x-request-id"


class ReplicaError(RuntimeError):
    """The replica can't answer requests any more: Ray starts another one."""


@serve.ingress()
class Replica:
    """A model and its endpoints. It is ready for Ray once it has made a reply.

    It drains when it is no longer on Ray's list of running replicas: it refuses new realtime
    sessions and ends the open ones, while it completes all requests, even late ones.
    """

    # Ray awaits `__init__`.
    async def __init__(self, settings: FleetSettings):  # type: ignore[misc]
        """Load the model. Raises its errors, and OptionError for cores that don't fit."""
        logs.log_to_stderr("info")
        self._loop = asyncio.get_running_loop()
        self._service = Service.of(settings.server_settings())
        self._service.decoder.start()
        self._load = ReplicaFigures(self._service.metrics.registry)
        load = settings.load_arguments(self._cores(settings))
        model = await self._loop.run_in_executor(None, partial(load_and_answer, **load))
        self._service.model.loaded(self._service.checked(model))
        context = serve.get_replica_context()
        PRESENCE.watch(context.replica_tag, self._on_change)
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        self._own = own.options()  # creates the handle's router
        beside = (self._copy_metrics(), self._service.watch())
        self._beside = [asyncio.create_task(task) for task in beside]
        logs.event("ready", model=self._service.model.name, replica=context.replica_tag)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray sends requests to."""
        return _BehindProxy(make_app(self._service), serve.get_replica_context().replica_tag)

    async def check_health(self) -> None:
        """Raise ReplicaError if this replica has to be replaced. Ray calls it."""
        fault = self._service.model.fault
        if fault is not None:
            raise ReplicaError(fault)

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
        # Ray lists all of the replica's cores there; each stage's process gets its own range.
        os.environ.pop("NEURON_RT_VISIBLE_CORES", None)
        config = read_config(resolve_checkpoint(settings.model))
        stages = STAGES if config.talker is not None else STAGES[:1]
        tree, cores = settings.load.compiled_path, [int(core) for core in given]
        needed = {} if tree is None else needed_cores(tree, stages)
        return stage_cores(cores, settings.neuron_cores, settings.load.placement, needed)

    def _on_change(self, listed: bool) -> None:
        self._loop.call_soon_threadsafe(self._stay if listed else self._leave)

    def _stay(self) -> None:
        self._service.model.keep_sessions()

    def _leave(self) -> None:
        model, seconds = self._service.model, self._service.settings.drain_timeout_s
        logs.event("draining", most_s=seconds, fault=model.fault)
        model.end_sessions(seconds)
        if model.fault is not None:  # Ray would wait for requests that nobody answers
            self._loop.call_later(FAILED_DRAIN_S, os._exit, ExitStatus.MODEL_DIED)

    async def _copy_metrics(self) -> None:
        ray_metrics = RayMetrics(self._service.metrics.registry)
        while True:
            try:
                ray_metrics.copy()
            except Exception:  # failing metrics must not stop the replica
                logs.logger.exception("metrics")
            await asyncio.sleep(FIGURES_S)


class RayMetrics:
    """Copies of all samples of a registry, as Ray gauges labelled with the replica.

    Every node exposes them to Prometheus. A sample keeps its name and labels; Ray adds the prefix
    `ray_` and the labels application, deployment and replica. All are gauges, since Ray's counters
    and histograms can't be set: rates and quantiles are computed from the samples in the same way.
    """

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
        self._gauges: dict[str, metrics.Gauge] = {}

    def copy(self) -> None:
        """Set Ray's gauges to the samples' current values."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    labels = tuple(sample.labels)
                    gauge = metrics.Gauge(sample.name, family.documentation, labels)
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, dict(sample.labels))


class _BehindProxy:
    """Application behind a Ray proxy: drops the route's prefix, and uses the proxy's request id.

    The ids of responses have the session's key, by which the proxy routes what names them. Answers
    have the replica's name in the header x-replica.
    """

    def __init__(self, app: ASGIApp, replica: str):
        self._app, self._replica = app, replica.encode()
        self._session = session_header().lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        prefix = scope.get("root_path", "")
        inner: dict[str, Any] = {**scope, "path": scope["path"].removeprefix(prefix) or "/"}
        inner["root_path"] = ""
        found = [value for name, value in scope["headers"] if name == _REQUEST_ID]
        if found:
            inner["request_id"] = found[-1].decode("latin-1")
        sessions = [v.decode("latin-1") for n, v in scope["headers"] if n == self._session]
        if sessions and is_session_key(sessions[-1]):
            inner[SESSION_KEY] = sessions[-1]

        async def named(message: Message) -> None:
            if message["type"].endswith(("http.response.start", "websocket.accept")):
                # The proxy adds the header with the id itself.
                headers = message.get("headers", ())
                kept = [pair for pair in headers if pair[0] != _REQUEST_ID]
                message = {**message, "headers": [*kept, (b"x-replica", self._replica)]}
            await send(message)

        return await self._app(inner, receive, named)


async def _lifespan(receive: Receive, send: Send) -> None:
    for word in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{word}.complete"})
