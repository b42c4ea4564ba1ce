"""The policy as Ray takes it. `make test-ray`."""

import os
from types import SimpleNamespace

import pytest

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

from ray.serve.config import AutoscalingConfig


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
