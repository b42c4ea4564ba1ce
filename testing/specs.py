"""Specs of engines over a checkpoint, with a test's settings of their plan."""

from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.conversation.template import Conversation
from qwen3_omni_neuron.engines.spec import EngineSpec


def engine_spec(checkpoint: Path, target: str = "cpu", **settings: Any) -> EngineSpec:
    """Return a spec. settings: of make_plan; float32, two slots and 256 positions by default."""
    usual: dict[str, Any] = {"dtype": "float32", "max_concurrency": 2, "context_length": 256}
    config = read_config(checkpoint)
    plan = make_plan(checkpoint, config, target, **(usual | settings))
    return EngineSpec(plan, config, Conversation(checkpoint, config).newline_id)
