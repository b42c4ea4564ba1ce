"""The good client's key and question: all that a watcher's process has to import of the attacks."""

from typing import Any

MODEL = "load"  # the name that `testing.server_process` gives
GOOD_KEY, BAD_KEY = "the-key-of-the-good-client", "the-key-of-the-attacker"
QUESTION, ANSWER = "say three five seven red", "three five seven red"


def good_question(stream: bool) -> dict[str, Any]:
    """Return a chat request whose spoken answer is known."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16" if stream else "wav"},
        "stream": stream,
        "temperature": 0,
        "seed": 0,
    }
