"""A server's KV caches filled once, so that its memory does not grow by that later.

Pages of a KV cache are taken from the system when they are first written, a slot's by the first
long prompt that it gets.
"""

import contextlib
import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

ROWS = 3500  # of the 4096 rows in a slot of the checkpoint that ships
PATH = "/v1/chat/completions"


def fill_slots(slots: int, connect: Callable[[], http.client.HTTPConnection], key: str = "") -> int:
    """Send as many long prompts at once as there are slots; return how many were answered."""

    def fill(number: int) -> bool:
        words = f"{number}{'a b ' * (ROWS // 2)}"  # no slot can copy another slot's rows
        body = {
            "model": "load",
            "messages": [{"role": "user", "content": words}],
            "modalities": ["text", "audio"],
            "audio": {"voice": "Ethan", "format": "wav"},
            "max_tokens": 2,
            "talker_max_new_tokens": 2,
        }
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        with contextlib.closing(connect()) as connection:
            connection.request("POST", PATH, json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
        return answer.status == http.client.OK

    with ThreadPoolExecutor(slots) as pool:
        return sum(pool.map(fill, range(slots)))
