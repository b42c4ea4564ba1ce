"""A server's KV caches filled once, so that its memory does not grow by that later.

Pages of a KV cache are taken from the system when they are first written, a slot's by the first
long prompt that it gets.
"""

from concurrent.futures import ThreadPoolExecutor

from testing.http_client import ask

ROWS = 3500  # of the 4096 rows in a slot of the checkpoint that ships
PATH = "/v1/chat/completions"


def fill_slots(slots: int, url: str, key: str | None = None) -> int:
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
        return ask(url + PATH, body, key=key).status == 200

    with ThreadPoolExecutor(slots) as pool:
        return sum(pool.map(fill, range(slots)))
