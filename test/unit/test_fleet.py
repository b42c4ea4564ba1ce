"""Replicas in a Ray cluster, as far as it goes without Ray: settings, cores, health, presence."""

import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import yaml

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.compilation.manifest import Manifest, write_manifest
from qwen3_omni_neuron.compilation.plan import cores_of_stages
from qwen3_omni_neuron.compilation.tree import needed_cores
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import ArtifactError, EngineDiedError, OptionError
from qwen3_omni_neuron.events import ModelInfo, StageTime, Status
from qwen3_omni_neuron.neuron.target import LIMITS
from qwen3_omni_neuron.serving.edge.gate import Sites
from qwen3_omni_neuron.serving.fleet.cores import stage_cores
from qwen3_omni_neuron.serving.fleet.settings import IMPORT_PATH, FleetSettings, check_config
from qwen3_omni_neuron.serving.model import ServedModel
from qwen3_omni_neuron.serving.openai.errors import ApiError
from testing.http_server import wait_until
from testing.imports import ROOT

CONFIGS = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
CHIP_CORES = 4  # logical cores of a chip of trn2, at LNC=2


def test_settings_are_those_of_load_and_of_the_server() -> None:
    settings = FleetSettings.parse(
        {
            "model": "/a/tiny",
            "max_concurrency": 3,
            "threads": 16,
            "drain_timeout_s": 7,
            "allowed_origins": ["HTTPS://A.b/"],
            "allowed_hosts": ["Ray-head.example"],
        }
    )
    assert settings.model_name == "/a/tiny"  # no such folder: as a hub id is
    assert settings.drain_timeout_s == 7
    assert settings.allowed_origins == ("https://a.b",)
    # Without keys a fleet is asked by address, and under the names that it is given.
    sites = Sites(settings.server_settings())
    for host in (b"127.0.0.1:8000", b"localhost:8000", b"10.0.0.7", b"ray-head.example:8000"):
        sites.check([(b"host", host)])
    with pytest.raises(ApiError, match="allowed_hosts"):
        sites.check([(b"host", b"evil.example")])
    arguments = settings.load_arguments(None)
    assert (arguments["max_concurrency"], arguments["threads"]) == (3, 16)
    compiled = FleetSettings.parse({"compiled": "/tree", "threads": None})
    assert compiled.load.threads is None
    assert compiled.load_arguments(None)["max_concurrency"] is None  # the tree's


def test_wrong_settings_are_refused_by_name() -> None:
    for args, said in (
        ({"max_concurency": 3}, "unknown option 'max_concurency'. Did you mean max_concurrency."),
        ({"host": "0.0.0.0"}, "unknown option 'host'"),
        ({"max_bodies_bytes": 1, "a": 2}, "max_bodies_bytes was removed: use max_held_bytes"),
        ({"api_key": "x"}, "api_keys"),
        ({"max_concurrency": "eight"}, "max_concurrency must be an integer"),
        ({"max_media": "few"}, "max_media must be an integer"),
        ({"drain_timeout_s": 0}, "drain_timeout_s must be a number above 0"),
        ({"neuron_cores": -8}, "neuron_cores must be an integer of 0 or more"),
        ({"max_queued": -1}, "max_queued must be an integer of 0 or more, got -1"),
        ({"kept_replies": 1.5}, "kept_replies must be an integer"),
        ({"load": {}}, "unknown option 'load'"),
        ({"placement": "here"}, "placement must be shared or split, got 'here'"),
        ({"threads": 0}, "threads must be an integer of 1 or more, got 0"),
    ):
        with pytest.raises(OptionError, match=f"(?s){said}"):
            FleetSettings.parse(args)


def test_api_keys_are_read_by_the_replica_and_shown_nowhere(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    settings = FleetSettings.parse({"api_keys": str(file)})
    assert "secret" not in repr(settings)
    assert settings.server_settings().api_keys == ("secret",)


def test_rays_cores_are_those_of_the_stages() -> None:
    for given, placement, needed, cores in (
        (range(8, 16), "shared", (8, 8, 8), ("8-15", "8-15", "8-15")),
        (range(8, 16), "shared", (8, 8, 1), ("8-15", "8-15", "8-15")),
        ([26, 25, 24, 27], "shared", (4, 4, 4), ("24-27", "24-27", "24-27")),
        (range(24), "split", (8, 8, 8), ("0-7", "8-15", "16-23")),
        (range(17), "split", (8, 8, 1), ("0-7", "8-15", "16")),
        # Those that are left over are idle.
        (range(20, 40), "split", (8, 8, 1), ("20-27", "28-35", "36")),
        (range(8), "shared", (4, 4, 1), ("0-3", "0-3", "0-3")),
        # A gap between two stages is none in a stage.
        ([0, 1, 4, 5, 8, 9], "split", (2, 2, 2), ("0-1", "4-5", "8-9")),
        ([7, 3, 5], "split", (1, 1, 1), ("3", "5", "7")),
        (range(8), "split", (8,), ("0-7",)),
    ):
        found = stage_cores(
            list(given), len(given), placement, dict(zip(STAGES, needed, strict=False))
        )
        assert found == dict(zip(STAGES, cores, strict=False))


def test_cores_that_do_not_fit_are_refused() -> None:
    for given, wanted, placement, needed, said in (
        (range(8), 24, "split", (8, 8, 8), "ask for 24 .* has given 8"),
        (range(16), 16, "split", (8, 8, 1), "need 17 .thinker 8, talker 8, vocoder 1"),
        (range(4), 4, "shared", (8, 8, 1), "placement shared: .* need 8 "),
        ([0, 1, 2, 8], 4, "shared", (4, 4, 1), "needs 4 neuron_cores in a row.*0, 1, 2, 8"),
        ([0, 2, 3, 4, 5], 5, "split", (2, 2, 1), "thinker needs 2 neuron_cores in a row.*0, 2"),
    ):
        with pytest.raises(OptionError, match=f"(?s){said}"):
            stage_cores(list(given), wanted, placement, dict(zip(STAGES, needed, strict=True)))


def test_a_tree_says_how_many_cores_its_stages_need(tmp_path) -> None:
    for tp, needed in (
        (8, (8, 8, 8)),
        ("thinker=4,talker=2,predictor=4,vocoder=1,encoders=8", (8, 4, 1)),
    ):
        write_manifest(tmp_path, Manifest("", {"tp": tp}, {}, {}))
        assert tuple(needed_cores(tmp_path, STAGES).values()) == needed
    write_manifest(tmp_path, Manifest("", {"tp": "many"}, {}, {}))
    with pytest.raises(ArtifactError, match="that this version can't run: tp must be a number, or"):
        needed_cores(tmp_path, STAGES)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.name)
def test_every_yaml_that_ships_can_be_used(config) -> None:
    check_config(config)
    (application,) = yaml.safe_load(config.read_text())["applications"]
    settings = FleetSettings.parse(application["args"])
    given, tree = list(range(settings.neuron_cores)), settings.load.compiled_path
    if tree is None:
        assert not given
        return
    needed = cores_of_stages(LIMITS.tp[application["args"]["instance"]], STAGES)
    placement = settings.load.placement
    assert stage_cores(given, len(given), placement, needed) is not None
    total = sum(needed.values()) if placement == "split" else max(needed.values())
    assert len(given) == -(-total // CHIP_CORES) * CHIP_CORES, "the fewest chips that have them"


def test_a_yaml_that_can_not_be_used_is_refused_before_ray_starts(tmp_path) -> None:
    for content, said in (
        ("[", "can't be read as a Serve YAML"),
        ("3", "can't be read as a Serve YAML"),
        ("applications: [{import_path: other:app}]", f"with import_path {IMPORT_PATH}. Begin"),
        (f"applications: [{{import_path: '{IMPORT_PATH}', args: {{a: 1}}}}]", "unknown option 'a'"),
    ):
        file = tmp_path / "config.yaml"
        file.write_text(content)
        with pytest.raises(OptionError, match=said):
            check_config(file)
    with pytest.raises(OptionError, match="can't be read"):
        check_config(tmp_path / "nothing.yaml")


def test_the_command_line_takes_the_yaml_alone_and_names_the_extra(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--ray", "a.yaml", "--port", "1", "--allow-host", "b"])
    assert "a.yaml: leave out --allow-host, --port" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--ray", "a.yaml"]) == 1
    assert "pip install 'qwen3-omni-neuron[ray]'" in capsys.readouterr().err


class Stalling:
    """A model whose talker is in a call."""

    info = ModelInfo(("Ethan",), False, False, slots=1, max_queued=0, context_length=16)

    def __init__(self) -> None:
        self.call_s = 0.0

    def status(self) -> Status:
        idle, talking = StageTime(3, 0.1), StageTime(2, 0.1, self.call_s)
        return Status(1, 0, {"thinker": idle, "talker": talking, "vocoder": idle})


def served(omni: Any) -> ServedModel:
    model = ServedModel("m", stall_timeout_s=5.0)
    model.loaded(omni)
    return model


def test_a_call_that_takes_too_long_is_a_stall_and_one_that_returns_is_none() -> None:
    omni = Stalling()
    model = served(omni)
    assert (model.state, model.ready, model.fault) == ("ready", True, None)
    omni.call_s = 5.1
    assert (model.state, model.ready) == ("stalled", False)
    assert model.fault is not None
    assert "call of the talker has run for 5 s, but stall_timeout_s is 5 s" in model.fault
    with pytest.raises(Exception, match="the server is stalled"):
        model.take()
    omni.call_s = 0.0
    assert (model.state, model.fault) == ("ready", None)


class Held:
    """A thinker whose prefill waits until it may go on."""

    def __init__(self, engine: Any, go: threading.Event):
        self._engine, self._go = engine, go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, *given: Any) -> Any:
        self._go.wait(20)
        return self._engine.prefill(*given)


def longest_call_s(omni: Qwen3Omni) -> float:
    return max(stage.call_s for stage in omni.status().stages.values())


def test_a_stage_says_how_long_its_call_has_taken(checkpoint) -> None:
    go = threading.Event()

    def hold(engines: Engines) -> Engines:
        return replace(engines, thinker=Held(engines.thinker, go))  # type: ignore[arg-type]

    messages: Any = [{"role": "user", "content": "Hello"}]
    with Qwen3Omni.load(checkpoint, max_concurrency=1, wrap_engines=hold) as omni:
        assert longest_call_s(omni) == 0
        with omni.stream(messages, thinker_max_new_tokens=2, talker_max_new_tokens=4) as stream:
            wait_until(lambda: longest_call_s(omni) > 0.1)
            assert omni.status().stages["talker"].call_s == 0
            go.set()
            list(stream)
        assert longest_call_s(omni) == 0


def test_a_model_that_died_needs_a_new_start() -> None:
    model = served(Stalling())
    model.noticed(EngineDiedError("the talker's process ended."))
    assert model.state == "failed"
    assert model.fault is not None
    assert model.sessions_end_in_s is not None


def test_sessions_have_as_long_as_the_first_call_said() -> None:
    model = served(Stalling())
    assert model.sessions_end_in_s is None
    model.end_sessions(100)
    time.sleep(0.01)
    model.drain(1000)
    assert model.sessions_end_in_s is not None and 90 < model.sessions_end_in_s < 100
    assert model.state == "draining"
