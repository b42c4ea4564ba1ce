"""A dialogue in text by the command llm, which calls the tool by itself.

python -m testing.clients.llm_command URL chat|responses
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The tool writes its arguments into a file: it runs in llm's process.
FUNCTION = """
import json, os

def look_up(word: str) -> str:
    "Look a word up."
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:
        print(json.dumps({"word": word}), file=file)
    return "red"
"""


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue, its second turn by --continue. Returns the arguments and the answers."""
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder, "calls")
        environment = {
            **os.environ,
            "LLM_USER_PATH": folder,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "CALLS": str(calls),
        }
        model = {"chat": "gpt-4o", "responses": "gpt-5"}[way]

        def ask(*arguments: str) -> str:
            command = [str(Path(sys.executable).with_name("llm")), *arguments]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            return done.stdout.strip()

        first = ask("-m", model, "--functions", FUNCTION, "look it up")
        second = ask("--continue", "what is two plus four")
        made = [json.loads(line) for line in calls.read_text(encoding="utf-8").splitlines()]
    return {"calls": made, "answers": [first, second]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
