"""Ray's own parts in the simulated fleet, and the policy as Ray takes it. `make test-ray`."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

from ray.serve.config import AutoscalingConfig

from bench import fleet
from testing.replaying.ray_parts import RayDelays, RayRing

KEYS = [f"key-{n}" for n in range(600)]


def test_the_ring_keeps_conversations_where_they_are() -> None:
    ring, other = RayRing(), RayRing()
    names = [f"replica-{n}" for n in range(6)]
    ring.update(names)
    other.update(reversed(names))
    before = [ring.rank(key) for key in KEYS]
    assert before == [other.rank(key) for key in KEYS]  # in every proxy
    assert all(len(set(found)) == 3 for found in before)
    ring.update(names[:-1])
    moved = [a[0] != ring.rank(key)[0] for a, key in zip(before, KEYS, strict=True)]
    assert moved == [found[0] == names[-1] for found in before]  # no others
    assert 0 < sum(moved) < len(KEYS) / 3


def test_replicas_follow_a_wish_after_rays_delays() -> None:
    settle = RayDelays(max_replicas=50, upscale_delay_s=30, downscale_delay_s=600)
    wishes = [(9, t) for t in (0, 10, 20, 30)] + [(2, t) for t in (40, 50, 630, 640)]
    targets = [3]
    for wanted, now in wishes:
        targets.append(settle(wanted, targets[-1], float(now)))
    assert targets[1:] == [3, 3, 3, 9, 9, 9, 9, 2]


def test_the_policy_of_a_yaml_is_called_with_its_settings() -> None:
    name = "qwen3_omni_neuron.serving.fleet.scaling:FirstAudioPolicy"
    policy = {"policy_function": name, "policy_kwargs": {"target_s": 1.5, "spare": 2}}
    made = AutoscalingConfig(max_replicas=9, policy=policy).policy
    called = made.get_policy()(**made.policy_kwargs)
    figures = {"slots": {"a": 4.0}, "requests": {"a": 9.0}}
    context = SimpleNamespace(
        aggregated_metrics=figures, total_queued_requests=0.0, target_num_replicas=1
    )
    assert called(context) == (4 + 2, {})


def test_the_fleet_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.json"
    few = ["--requests", "2", "--slots", "2", "--replicas", "2", "--day-replicas", "0"]
    words = ["--profile", "port-167", "--placement", "split", *few, "--json", str(file)]
    assert fleet.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| port")]
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(lines) == len(rows) == 2
    assert all(0 < row["first_audio_p95_s"] <= 2.0 for row in rows)
    assert fleet.main(["--profile", "none"]) == 1
    assert "none" in capsys.readouterr().err
