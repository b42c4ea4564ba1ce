"""A dialogue of one caller by the load test guidellm, which answers the tool's call by itself.

python -m testing.clients.guidellm_command URL chat|responses
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look a word up.", "parameters": PARAMETERS},
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
# A column's number is its turn's.
TURNS = {
    "prompt_0": "look it up",
    "tools_0": json.dumps([TOOL]),
    "tool_response_0": "red",
    "prompt_1": "what is two plus four",
}


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the tool's arguments and the answers."""
    with tempfile.TemporaryDirectory() as folder:
        data, written = Path(folder, "dialogue.csv"), Path(folder, "written.json")
        with data.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows((TURNS.keys(), TURNS.values()))
        command = [str(Path(sys.executable).with_name("guidellm")), "run"]
        command += ["--backend", f"kind=openai_http,target={url},request_format={PATHS[way]}"]
        command += ["--profile", "kind=synchronous", "--data", f"kind=csv_file,path={data}"]
        command += ["--output", f"kind=json,path={written}", "--disable-console"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        made = json.loads(written.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    if made["errored"]:
        raise RuntimeError(str(made["errored"]))
    replies = made["successful"]
    calls = [call for reply in replies for call in reply["tool_calls"] or ()]
    return {
        "calls": [json.loads(call["function"]["arguments"]) for call in calls],
        "answers": [reply["output"] for reply in replies if reply["output"] is not None],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
