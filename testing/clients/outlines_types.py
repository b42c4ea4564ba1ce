"""Texts of given forms by Outlines, over its doors of vLLM and of SGLang.

python -m testing.clients.outlines_types URL vllm|sglang
"""

import json
import sys
from typing import Any, Literal

import outlines
from openai import OpenAI
from outlines.types import Regex


def made(url: str, way: str) -> dict[str, Any]:
    """Return a choice, a number and a streamed match of a regular expression."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = getattr(outlines, f"from_{way}")(client, "qwen3-omni")
    pieces = model.stream("say a word", Regex("[a-c]{3}"), max_tokens=20)
    return {
        "choice": model("say red", Literal["red", "blue"]),
        "number": model("what is two plus four", int, max_tokens=20),
        "match": "".join(pieces),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(made(*sys.argv[1:])))
