"""Clients of others that ask in text, as they come from their registries, by address and key alone.

Each is a process in an environment of its own, which `make test-clients` makes. It holds a dialogue
of two turns with the checkpoint that ships: a question that is answered by a call of a tool, whose
result is said, and a sum. The first call alone is scripted. A load test without tools asks sums.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import serving, url_of
from testing.imports import ROOT
from testing.scripted_model import ScriptedModel

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sky"}}\n</tool_call>'
DIALOGUE_S = 240.0
# Ways of a client, by its environment and its program in testing/clients.
WAYS = {
    ("ai-node", "ai_node.cjs"): ("compatible", "chat", "responses"),
    ("pydantic-ai", "pydantic_ai_text"): ("chat", "responses"),
    ("langchain", "langchain_python"): ("chat", "responses"),
    ("langchain-node", "langchain_node.cjs"): ("chat", "responses"),
    ("openai-agents", "openai_agents_text"): ("chat", "responses"),
    ("openai-agents-node", "openai_agents_text_node.cjs"): ("chat", "responses"),
    ("llm", "llm_command"): ("chat", "responses"),
    ("litellm", "litellm_sdk"): ("chat", "responses", "proxy", "anthropic"),
    ("strands", "strands_agent"): ("chat", "responses"),
    ("guidellm", "guidellm_command"): ("chat", "responses"),
}
DIALOGUES = [(*client, way) for client, ways in WAYS.items() for way in ways]
WITH_OBJECT = ("ai-node", "pydantic-ai", "langchain", "langchain-node")


class CallingModel:
    """The model, except that the first answer to a question with a tool is a call."""

    def __init__(self, omni: Qwen3Omni):
        self._omni = omni

    def __getattr__(self, name: str) -> Any:
        return getattr(self._omni, name)

    def stream_text(self, messages: Any, **options: Any) -> Any:
        called = any(message["role"] == "tool" for message in messages)
        free = options.get("tool_choice") in (None, "auto", "required")
        if options.get("tools") and free and not called:
            return ScriptedModel([CALL]).stream_text(messages)
        return self._omni.stream_text(messages, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni:
        model: Any = CallingModel(omni)
        with serving(model) as running:
            yield running


def made_by(name: str, program: str, *arguments: str) -> Any:
    """Run a client's program in its environment, and return what it wrote."""
    if name not in os.environ.get("TEST_CLIENTS", "").split():
        pytest.skip(f"{name} needs an environment of its own, which has a client's packages")
    environment, commands = ROOT / f".venv-clients-{name}", ROOT / f".venv-clients-{name}/bin"
    if program.endswith(".cjs"):
        command = [str(commands / "node"), str(ROOT / "testing/clients" / program)]
    else:
        command = [str(commands / "python"), "-m", f"testing.clients.{program}"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "NODE_PATH": str(environment / "node_modules")},
        capture_output=True,
        text=True,
        timeout=DIALOGUE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "program", "way"), DIALOGUES)
def test_a_dialogue_with_a_tool(name, program, way, server) -> None:
    made = made_by(name, program, url_of(server), way)
    assert made["calls"] == [{"word": "sky"}]
    assert made["answers"] == ["red", "six"]
    if name in WITH_OBJECT:
        assert made["object"] in ({"colour": "red"}, {"colour": "blue"})
    if name == "langchain":
        assert made["named"] == ["paint"]


@pytest.mark.parametrize("way", ("chat", "responses"))
def test_a_dialogue_of_a_load_test_without_tools(way, server) -> None:
    made = made_by("evalscope", "evalscope_command", url_of(server), way)
    assert made == {"answers": ["six", "eight"], "replies": 3}


@pytest.mark.parametrize(
    ("name", "program"), (("livekit", "livekit_responses"), ("pipecat", "pipecat_responses"))
)
def test_a_dialogue_by_responses_over_a_websocket(name, program, server) -> None:
    assert made_by(name, program, url_of(server)) == {"answers": ["six", "eight"]}


@pytest.mark.parametrize("way", ("vllm", "sglang"))
def test_texts_of_given_forms(way, server) -> None:
    made = made_by("outlines", "outlines_types", url_of(server), way)
    assert made["choice"] in ("red", "blue") and made["number"].lstrip("+-").isdigit()
    assert len(made["match"]) == 3 and set(made["match"]) <= set("abc")
