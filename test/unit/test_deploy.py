"""Images, manifests and units of deploy/: what they name exists, and their times fit together.

Where their own tools are installed, they are checked by these, too: `make test-deploy`.
"""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.errors import ExitStatus
from qwen3_omni_neuron.neuron.cores import PHYSICAL_CORES
from qwen3_omni_neuron.serving import page
from qwen3_omni_neuron.serving.endpoints.status import router
from qwen3_omni_neuron.serving.fleet.settings import (
    CALLBACK,
    CALLBACK_VARIABLE,
    IMPORT_PATH,
    KILL_VARIABLE,
    FleetSettings,
)
from qwen3_omni_neuron.serving.server import KEEP_ALIVE_S
from qwen3_omni_neuron.serving.settings import KEYS_VARIABLE, ServerSettings
from testing.imports import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PODS = [path for path in MANIFESTS if path.stem != "rayservice"]
COMPOSE = DEPLOY / "compose.yaml"
CADDY, NGINX = DEPLOY / "proxy" / "Caddyfile", DEPLOY / "proxy" / "nginx.conf"
UNIT = DEPLOY / "systemd" / "qwen3-omni-neuron.service"
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PORT = ServerSettings().port


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(path: Path, kind: str) -> Any:
    (found,) = (document for document in documents(path) if document["kind"] == kind)
    return found


def pod_spec(path: Path) -> Any:
    return of_kind(path, "Deployment")["spec"]["template"]["spec"]


def container(path: Path) -> Any:
    (found,) = pod_spec(path)["containers"]
    return found


def parsed(words: list[str]) -> Any:
    """The flags of a command that ends in `qwen3-omni-neuron serve ...`, by the real parser."""
    names = [Path(word).name for word in words]
    return cli.make_parser().parse_args(words[names.index("qwen3-omni-neuron") + 1 :])


def served_paths() -> set[str]:
    return {route.path for route in router.routes if isinstance(route, APIRoute)}


def instructions(image: Path) -> list[tuple[str, str]]:
    """Name and words of each instruction of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", image.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    found = [line.partition(" ")[::2] for line in lines if line.strip()]
    return [(name, words.strip()) for name, words in found]


def arguments_of(image: Path) -> dict[str, str]:
    """Defaults of the build's arguments."""
    given = [words.partition("=") for name, words in instructions(image) if name == "ARG"]
    return {name: value for name, equals, value in given if equals}


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_a_pod_serves_by_flags_and_paths_that_exist(path) -> None:
    serve = container(path)
    flags = parsed([*serve["command"], *serve["args"]])
    assert flags.port == serve["ports"][0]["containerPort"]
    assert flags.host == "0.0.0.0"
    assert flags.threads == int(serve["resources"]["requests"]["cpu"])
    paths = {p: serve[f"{p}Probe"]["httpGet"] for p in ("startup", "readiness", "liveness")}
    assert {p: get["path"] for p, get in paths.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {"/ready", "/health"} <= served_paths()
    names = {port["name"] for port in serve["ports"]}
    assert {get["port"] for get in paths.values()} == names
    assert {port["targetPort"] for port in of_kind(path, "Service")["spec"]["ports"]} == names
    mounts = {mount["mountPath"] for mount in serve["volumeMounts"]}
    for file in filter(None, (str(flags.api_keys), flags.model, flags.compiled_path)):
        assert any(file.startswith(f"{mount}/") for mount in mounts), file


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_a_pod_may_drain_before_it_is_killed(path) -> None:
    serve, spec = container(path), pod_spec(path)
    drain_s = parsed([*serve["command"], *serve["args"]]).drain_timeout_s
    command, seconds = serve["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert spec["terminationGracePeriodSeconds"] >= int(seconds) + drain_s + 10


def test_the_fleet_asks_for_cores_that_its_nodes_have() -> None:
    service = of_kind(DEPLOY / "kubernetes" / "rayservice.yaml", "RayService")["spec"]
    serve = yaml.safe_load(service["serveConfigV2"])
    (application,) = serve["applications"]
    (deployment,) = application["deployments"]
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    node = group["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"]
    cores = worker["resources"]["limits"]["aws.amazon.com/neuroncore"]
    arguments = application["args"]
    assert application["import_path"] == IMPORT_PATH
    assert FleetSettings.parse(arguments).load.placement == "split"
    assert {"name": CALLBACK_VARIABLE, "value": CALLBACK} in worker["env"]
    assert {"name": KILL_VARIABLE, "value": "1"} in worker["env"]
    assert (arguments["instance"], cores) == (node, PHYSICAL_CORES[node] // 2)
    a_node = cores // arguments["neuron_cores"]
    assert deployment["num_replicas"] == a_node * group["replicas"]
    assert int(worker["resources"]["requests"]["cpu"]) >= a_node * arguments["threads"]
    assert {"containerPort": serve["http_options"]["port"], "name": "serve"} in worker["ports"]
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > arguments["drain_timeout_s"] + 30


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_serves_as_nobody_special(image) -> None:
    final = instructions(image)
    final = final[max(i for i, (name, _) in enumerate(final) if name == "FROM") :]
    found = dict(final)
    assert int(found["USER"]) > 1000
    assert parsed(json.loads(found["ENTRYPOINT"])).host == "0.0.0.0"
    assert int(found["EXPOSE"]) == PORT
    url = re.search(r"urlopen\('(http://127.0.0.1:(\d+)(/\w+))'", found["HEALTHCHECK"])
    assert url
    assert int(url[2]) == PORT
    assert url[3] in served_paths()
    compile(json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])[2], "health check", "exec")
    assert "XDG_CACHE_HOME=/cache" in found["ENV"]
    assert re.search(r"install --directory --owner serve /cache", found["RUN"])


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_installs_extras_and_files_that_exist(image) -> None:
    extras = re.findall(r"^([a-z]+) = \[", PYPROJECT, re.MULTILINE)
    assert set(arguments_of(image)["EXTRAS"].split(",")) <= set(extras)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name, words in instructions(image):
        if name == "COPY" and not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source.split('/')[0]}" in ignored


def test_the_unit_starts_again_what_a_new_start_can_mend() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8"))
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    never = {int(status) for status in service["RestartPreventExitStatus"].split()}
    assert ExitStatus.FAILED in never
    assert ExitStatus.MODEL_DIED not in never
    words = shlex.split(service["ExecStart"])
    assert words.pop() == "$ARGUMENTS"
    assert parsed(words).drain_timeout_s + 10 <= int(service["TimeoutStopSec"])
    (name,) = re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/(\w+)", service["ExecStart"])
    assert service["LoadCredential"].startswith(f"{name}:")
    # systemd makes the folder that the cache is in, and no other may be written to.
    assert service["Environment"] == f"XDG_CACHE_HOME=%C/{service['CacheDirectory']}"
    assert service["ProtectSystem"] == "strict"


def test_the_composed_server_may_drain_and_is_reached_through_its_proxy_alone() -> None:
    (config,) = documents(COMPOSE)
    serve, proxy = config["services"]["server"], config["services"]["proxy"]
    image = COMPOSE.parent / serve["build"]["context"] / serve["build"]["dockerfile"]
    assert image.resolve() in IMAGES
    assert f"-t {serve['image']} " in image.read_text(encoding="utf-8")
    drain_s = parsed(["qwen3-omni-neuron", "serve", *serve["command"]]).drain_timeout_s
    assert int(serve["stop_grace_period"].removesuffix("s")) >= drain_s + 10
    assert list(serve["environment"]) == [KEYS_VARIABLE]
    assert (serve["read_only"], serve["cap_drop"], serve["tmpfs"]) == (True, ["ALL"], "/tmp")
    assert serve["volumes"] == ["cache:/cache"]
    assert "ports" not in serve
    assert proxy["environment"]["OMNI_SERVER"] == f"server:{PORT}"
    mounted = {volume.split(":")[0] for volume in proxy["volumes"]}
    assert (mounted - config["volumes"].keys()) == {f"./{CADDY.relative_to(DEPLOY)}"}
    used = set(re.findall(r"\{\$(\w+):", CADDY.read_text(encoding="utf-8")))
    assert used == set(proxy["environment"])


def test_proxies_have_the_servers_address_and_limits() -> None:
    caddy, nginx = (path.read_text(encoding="utf-8") for path in (CADDY, NGINX))
    settings = ServerSettings()
    address = f"{settings.host}:{PORT}"
    assert f"reverse_proxy {{$OMNI_SERVER:{address}}}" in caddy
    assert f"    server {address};" in nginx
    assert f"max_size {settings.max_body_bytes >> 20}MiB " in caddy
    assert f"client_max_body_size {settings.max_body_bytes >> 20}m;" in nginx
    assert f"read_header {settings.header_timeout_s:g}s" in caddy
    assert f"read_body {settings.body_timeout_s:g}s " in caddy
    assert f"client_header_timeout {settings.header_timeout_s:g}s;" in nginx
    assert f"proxy_read_timeout {settings.max_realtime_s:g}s;" in nginx
    kept = re.search(r"keepalive_timeout (\d+)s;", nginx)
    assert kept
    assert int(kept[1]) < KEEP_ALIVE_S
    burst = re.search(r"burst=(\d+) ", nginx)
    assert burst
    assert int(burst[1]) > 2 * len(page.FILES)


def test_prometheus_reads_what_the_server_shows() -> None:
    (config,) = documents(DEPLOY / "prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] in served_paths()
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{PORT}"]}]


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name}, which checks deploy/, is not installed")
    return found


def assert_accepted(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_schemas_accept_the_manifests() -> None:
    assert_accepted(tool("kubernetes-validate"), "--strict", *PODS)


def test_yamllint_accepts_the_manifests_and_the_workflow() -> None:
    rules = "{extends: default, rules: {line-length: {max: 100}, document-start: disable}}"
    assert_accepted(tool("yamllint"), "--strict", "-d", rules, DEPLOY, ROOT / ".github")


def test_compose_accepts_its_file() -> None:
    # The file says what is missing, and where it is to be written.
    command = tool("docker-compose"), "-f", COMPOSE, "config", "--quiet"
    environment = {**os.environ, KEYS_VARIABLE: "key", "OMNI_NAME": "omni.example.org"}
    subprocess.run(command, env=environment, check=True)
    del environment["OMNI_NAME"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "see the top of this file" in done.stderr


def test_caddy_accepts_its_configuration() -> None:
    command = tool("caddy"), "validate", "--adapter", "caddyfile", "--config", CADDY
    assert_accepted(*command)
    formatted = subprocess.run((tool("caddy"), "fmt", CADDY), capture_output=True, check=True)
    assert formatted.stdout == CADDY.read_bytes()


def test_hadolint_accepts_the_images() -> None:
    assert_accepted(tool("hadolint"), *IMAGES, DEPLOY / "compile-check" / "Dockerfile")


def test_systemd_accepts_the_unit(tmp_path) -> None:
    program = tool("systemd-analyze")
    text = UNIT.read_text(encoding="utf-8")
    there = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    (tmp_path / UNIT.name).write_text(there, encoding="utf-8")
    assert_accepted(program, "verify", tmp_path / UNIT.name)
    assert_accepted(program, "security", "--offline=true", "--threshold=20", UNIT)
