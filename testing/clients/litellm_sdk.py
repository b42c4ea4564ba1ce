"""A dialogue in text by litellm: its SDK, or OpenAI's or Anthropic's client through its proxy.

python -m testing.clients.litellm_sdk URL chat|responses|proxy|anthropic
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_UP = {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": LOOK_UP}]
PROXY_KEY = "sk-0123456789abcdef0123456789abcdef"  # a proxy starts with none that is shorter
START_S = 180.0


def dialogue(complete: Any) -> dict[str, Any]:
    """Hold the dialogue in chat, the last turn streamed. Returns the arguments and the answers."""
    messages: list[Any] = [{"role": "user", "content": "look it up"}]
    asked = complete(messages=messages, tools=TOOLS).choices[0].message
    messages.append(asked.model_dump(exclude_none=True))
    calls = [json.loads(call.function.arguments) for call in asked.tool_calls]
    for call in asked.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "red"})
    first = complete(messages=messages, tools=TOOLS).choices[0].message
    messages.append(first.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "what is two plus four"})
    chunks = complete(messages=messages, tools=TOOLS, stream=True)
    second = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return {"calls": calls, "answers": [first.content, second]}


def in_responses(respond: Any) -> dict[str, Any]:
    """Hold the dialogue by litellm.responses(), as `dialogue` does."""
    tools = [{"type": "function", **LOOK_UP}]
    items: list[Any] = [{"role": "user", "content": "look it up"}]
    asked = respond(input=items, tools=tools)
    calls = [item for item in asked.output if item.type == "function_call"]
    items += [item.model_dump(exclude_none=True) for item in asked.output]
    for call in calls:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "red"})
    first = respond(input=items, tools=tools)
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"role": "user", "content": "what is two plus four"})
    *_, last = respond(input=items, tools=tools, stream=True)
    answers = [reply.output[0].content[0].text for reply in (first, last.response)]
    return {"calls": [json.loads(call.arguments) for call in calls], "answers": answers}


def in_messages(client: Any) -> dict[str, Any]:
    """Hold the dialogue in Anthropic's messages, as `dialogue` does."""
    tool = {"name": LOOK_UP["name"], "description": LOOK_UP["description"]}
    given = {"model": "speaker", "max_tokens": 1000}
    given["tools"] = [{**tool, "input_schema": LOOK_UP["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": "look it up"}]
    asked = client.messages.create(messages=messages, **given)
    calls = [part for part in asked.content if part.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "red"} for call in calls]
    messages.append({"role": "assistant", "content": asked.content})
    messages.append({"role": "user", "content": results})
    first = client.messages.create(messages=messages, **given)
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": "what is two plus four"})
    with client.messages.stream(messages=messages, **given) as stream:
        second = stream.get_final_message()
    answers = ["".join(part.text for part in reply.content) for reply in (first, second)]
    return {"calls": [call.input for call in calls], "answers": answers}


@contextmanager
def proxy(url: str) -> Iterator[str]:
    """Run litellm's proxy before the server. Yields the proxy's URL."""
    model = {"model": "openai/gpt-4o", "api_base": f"{url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "speaker", "litellm_params": model}]}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(file)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        keyed = {**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY}
        written = Path(folder, "log")
        with written.open("w", encoding="utf-8") as log:
            running = subprocess.Popen(command, env=keyed, stdout=log, stderr=log)
        try:
            end_s = time.monotonic() + START_S
            while not answers(f"http://127.0.0.1:{port}/health/liveliness"):
                if running.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(written.read_text(encoding="utf-8"))
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait()


def answers(url: str) -> bool:
    """Return whether a server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def run(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue in one of the ways."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched, at the import
    if way == "proxy":
        from openai import OpenAI

        with proxy(url) as before:
            client = OpenAI(base_url=f"{before}/v1", api_key=PROXY_KEY, max_retries=0)
            return dialogue(
                lambda **given: client.chat.completions.create(model="speaker", **given)
            )
    if way == "anthropic":
        from anthropic import Anthropic

        with proxy(url) as before:
            return in_messages(Anthropic(base_url=before, api_key=PROXY_KEY, max_retries=0))
    import litellm

    address = {"model": "openai/gpt-4o", "api_base": f"{url}/v1", "api_key": "none"}
    if way == "responses":
        return in_responses(lambda **given: litellm.responses(**address, **given))
    return dialogue(lambda **given: litellm.completion(**address, **given))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(*sys.argv[1:])))
