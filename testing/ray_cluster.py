"""A Ray cluster of this process on the loopback, with applications from Serve YAMLs in it."""

import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import ray
import yaml
from openai import OpenAI
from ray import serve
from ray.serve import scripts

from qwen3_omni_neuron.serving.fleet.settings import IMPORT_PATH, environment
from testing.http_server import wait_until

START_S = 600.0  # for replicas to start, on a busy machine
CPUS, CORES = 10, 24
ATTEMPTS = 3  # attempts to start a node, on a busy machine
EVERY_S = 0.25  # polling Ray takes a core, which the replicas that start need
_MEMORY_BYTES = 100 << 20  # size of Ray's object store, which requests don't pass through


class Cluster:
    """A running cluster. port: port of its HTTP proxy."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.figures_port = _free_port()
        self._applications: dict[str, dict[str, Any]] = {}

    def plan(
        self,
        name: str,
        replicas: int | None,
        prefix: str = "/",
        *,
        deployment: Mapping[str, Any] | None = None,
        **args: Any,
    ) -> None:
        """Put an application into the YAML, or change it. args: the YAML's `args`.

        deployment: further fields of Ray's deployment. replicas: None where these fields have it.
        """
        number = {} if replicas is None else {"num_replicas": replicas}
        self._applications[name] = {
            "name": name,
            "route_prefix": prefix,
            "import_path": IMPORT_PATH,
            "args": {"threads": 1, **args},
            "deployments": [{"name": "replica", **number, **(deployment or {})}],
        }

    def deploy(self, *application: Any, **args: Any) -> None:
        """Bring the cluster to the state of the YAML, as `serve run` does.

        application, args: arguments of a call of `plan` before.
        """
        if application:
            self.plan(*application, **args)
        config = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": list(self._applications.values()),
        }
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(config, file)
            file.flush()
            # In this process: another one would import Ray for seconds.
            command = ["run", "--non-blocking", "--address", self.address, file.name]
            scripts.cli.main(command, standalone_mode=False)

    def remove(self, name: str) -> None:
        """Begin to end an application."""
        del self._applications[name]
        serve.delete(name, _blocking=False)

    def wait_for(self, name: str, replicas: int, seconds: float = START_S) -> None:
        """Wait until an application runs with this many replicas and no others."""

        def runs() -> bool:
            state = self.state(name)
            assert state.status != "DEPLOY_FAILED", state.message
            deployment = state.deployments.get("replica")
            return (
                state.status == "RUNNING"
                and deployment is not None
                and dict(deployment.replica_states) == {"RUNNING": replicas}
            )

        wait_until(runs, seconds, EVERY_S)

    def running(self, name: str) -> int:
        """Return how many replicas of an application Ray considers healthy."""
        return int(self.state(name).deployments["replica"].replica_states.get("RUNNING", 0))

    @property
    def url(self) -> str:
        """The URL of its HTTP proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """The cluster's address, as Ray's commands take it."""
        return str(ray.get_runtime_context().gcs_address)

    def names(self) -> list[str]:
        """Return the names of all applications."""
        return list(serve.status().applications)

    def state(self, name: str) -> Any:
        """Return Ray's state of an application."""
        return serve.status().applications[name]

    def replicas(self, name: str) -> dict[str, int]:
        """Return the replicas' names, and the ids of their processes."""
        found = {}
        for replica, handle in self._actors(name).items():
            with suppress(ray.exceptions.RayActorError):  # the replica has just ended
                found[replica] = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))
        return found

    def _actors(self, name: str) -> dict[str, Any]:
        return {
            actor["name"].rpartition("#")[2]: ray.get_actor(actor["name"], actor["namespace"])
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["name"].startswith(f"SERVE_REPLICA::{name}#")
        }

    def cores(self, name: str) -> list[set[str]]:
        """Return the cores of each replica, as Ray gave them."""

        def own(_: Any) -> list[str]:
            return ray.get_runtime_context().get_accelerator_ids()["neuron_cores"]

        return [
            set(ray.get(handle.__ray_call__.remote(own))) for handle in self._actors(name).values()
        ]

    def kill(self, name: str, replica: str | None = None) -> float:
        """End a replica's process, as the system does when memory runs out.

        Returns when, by `time.monotonic`: to find the process takes Ray seconds on a busy machine.
        """
        running = self.replicas(name)
        killed_s = time.monotonic()
        os.kill(running[replica or min(running)], signal.SIGKILL)
        return killed_s

    def wait_for_new(self, name: str, before: Collection[str], seconds: float = START_S) -> None:
        """Wait for a replica that is none of these."""
        wait_until(lambda: set(self.replicas(name)) - set(before), seconds, EVERY_S)

    def client(self, prefix: str = "", retries: int = 0) -> OpenAI:
        """Return OpenAI's client of an application."""
        url = f"{self.url}{prefix}/v1"
        return OpenAI(base_url=url, api_key="none", max_retries=retries, timeout=60)

    def server(self, model_name: str, prefix: str = "") -> Any:
        """Return what the tests of `serve` need of a server: its port, and its model's name."""
        settings = SimpleNamespace(model_name=model_name)
        return SimpleNamespace(port=f"{self.port}{prefix}", settings=settings)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster with made-up Neuron cores, and end it."""
    made = Cluster()
    before = dict(os.environ)
    os.environ |= environment()
    os.environ |= {
        "RAY_AUTH_TOKEN": secrets.token_hex(),  # else Ray writes a token into the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_prestart_worker_first_driver": "0",  # else a worker for each of CPUS, for no task
        "RAY_worker_niceness": "0",  # else 15: replicas would wait for whatever runs beside them
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    # A socket's path has at most 107 bytes: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        try:
            _start(folder, made.figures_port)
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


def _start(folder: str, figures_port: int) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=CPUS,
                resources={"neuron_cores": CORES},
                include_dashboard=False,
                object_store_memory=_MEMORY_BYTES,
                namespace="serve",
                log_to_driver=False,
                _temp_dir=folder,
                _metrics_export_port=figures_port,
            )
            return
        except Exception as error:  # Ray's own error, if a node does not start in 30 s
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS:
                raise


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
