"""A dialogue of one caller by the load test of evalscope, which has no tools.

python -m testing.clients.evalscope_command URL chat|responses
"""

import json
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
APIS = {"chat": "openai", "responses": "openai_responses"}
# Its last request shows what it read of the answers before.
QUESTIONS = ("what is two plus four", "what is six plus two", "say red")


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the answers that it read, and how many replies it counted."""
    turns: list[dict[str, str]] = []
    for question in QUESTIONS:
        answer = {"role": "assistant", "content": "replaced by the server's"}
        turns += [{"role": "user", "content": question}, answer]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "dialogue.jsonl")
        data.write_text(json.dumps(turns), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("evalscope")), "perf"]
        command += ["--api", APIS[way], "--url", f"{url}{PATHS[way]}", "--model", "qwen3-omni"]
        command += ["--multi-turn", "--dataset", "custom_multi_turn", "--dataset-path", str(data)]
        command += ["--number", "1", "--outputs-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        (written,) = Path(folder).rglob("benchmark_data.db")
        with closing(sqlite3.connect(written)) as table:
            rows = table.execute("SELECT request, success FROM result").fetchall()
    last = json.loads(rows[-1][0])
    messages = last["messages" if way == "chat" else "input"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return {"answers": answers, "replies": sum(success for _, success in rows)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
