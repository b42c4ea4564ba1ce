"""Clients of others, as they come from their registries, with nothing set but address and key.

Each is a process in an environment of its own, which `make test-clients` makes. They hold a spoken
dialogue of three turns with the checkpoint that ships: a question that is answered by a call of a
tool, a long answer that is interrupted, and the answer to what interrupted it. The call alone is
scripted: that checkpoint never calls a tool by itself, and says a tool's result.
"""

import json
import os
import random
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.prompt.turns import Reply
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.session import Session
from testing.clients.microphone import LONG, QUESTION, RATE, SUM
from testing.http_server import made_certificate, serving, url_of
from testing.imports import ROOT
from testing.scripted_model import ScriptedModel
from train.speech import MEASURING, spoken_clip

CLIENTS = {
    "openai": "openai_python.py",
    "openai-agents": "openai_agents.py",
    "openai-node": "openai_node.cjs",
    "openai-agents-node": "openai_agents_node.cjs",
    "livekit": "livekit_agents.py",
    "pipecat": "pipecat_ai.py",
    "dashscope": "dashscope_realtime.py",
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sky"}}\n</tool_call>'
DIALOGUE_S = 90.0


@pytest.fixture(scope="module", params=CLIENTS)
def client(request) -> str:
    """The name of a client that is to be tested."""
    name = str(request.param)
    if name not in os.environ.get("TEST_CLIENTS", "").split():
        pytest.skip(f"{name} needs an environment of its own, which has a client's packages")
    return name


@pytest.fixture(scope="module")
def program(client) -> list[str]:
    """A client's program, in its environment."""
    file, commands = Path(CLIENTS[client]), ROOT / f".venv-clients-{client}" / "bin"
    if file.suffix == ".cjs":
        return [str(commands / "node"), str(ROOT / "testing/clients" / file)]
    return [str(commands / "python"), "-m", f"testing.clients.{file.stem}"]


@pytest.fixture(scope="module")
def certificate(client, tmp_path_factory) -> dict[str, Path]:
    """The server's certificate and its key, for a client that speaks TLS alone."""
    if client != "openai-node":
        return {}
    cert, key = made_certificate(tmp_path_factory.mktemp("certificate"))
    return {"tls_cert": cert, "tls_key": key}


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """The clips that are spoken, at the microphone's rate."""
    folder = tmp_path_factory.mktemp("clips")
    dice = random.Random(1)
    sum_of_two: NDArray[np.float32] = soundfile.read(ROOT / "examples/sum.wav", dtype="float32")[0]
    words = {
        QUESTION: spoken_clip("what is two plus four", MEASURING, dice),
        LONG: spoken_clip("say seven red goodbye white", MEASURING, dice),
        SUM: sum_of_two,
    }
    for name, samples in words.items():
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(pcm16(soxr.resample(samples, 16000, RATE)))
    return folder


def heard(turn: Any) -> bool:
    """Return whether a turn has sound."""
    content = turn.message["content"]
    return not isinstance(content, str) and any(part["type"] == "audio" for part in content)


@pytest.fixture
def server(certificate, monkeypatch) -> Iterator[Server]:
    """A server whose first answer to speech calls the tool."""
    real = Session.respond

    def respond(session: Session, speak: bool = True, **options: Any) -> Any:
        called = any(turn.role == "tool" for turn in session.turns)
        if called or not options["tools"] or not heard(session.turns[-1]):
            return real(session, speak, **options)
        scripted = ScriptedModel([CALL])
        stream: Any = (scripted.stream if speak else scripted.stream_text)(session.turns)
        stream.reply = Reply(speak, 15.0)
        stream.reply.ended = True
        session.insert(stream.reply)
        return stream

    monkeypatch.setattr(Session, "respond", respond)
    with Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni, serving(omni, **certificate) as running:
        yield running


def test_a_spoken_dialogue(client, program, certificate, server, clips) -> None:
    environment = {**os.environ, "NODE_PATH": str(ROOT / f".venv-clients-{client}/node_modules")}
    scheme = "http"
    if certificate:
        scheme, environment["NODE_EXTRA_CA_CERTS"] = "https", str(certificate["tls_cert"])
    done = subprocess.run(
        [*program, url_of(server, scheme), str(clips)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DIALOGUE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["calls"] == [{"word": "sky"}]
    first, cut, last = made["answers"]
    assert (first, last) == ("red", "eight")
    assert cut
    assert made["interrupted"] == [1]
    heard_first, _, heard_last = made["seconds"]  # of the one between, until it was interrupted
    assert min(heard_first, heard_last) > 0.2
