"""Bounded queue of one request's tokens and audio chunks, between the stages and the caller."""

import threading
from collections import deque
from collections.abc import Callable

from qwen3_omni_neuron.events import AudioChunk

MAX_TOKENS = 1024
MAX_CHUNKS = 32  # of at most 2 s each


class TextEnd:
    """Item that follows the last token."""


Item = int | AudioChunk | TextEnd


class Output:
    """Tokens and audio chunks of one request, in the order they were made.

    The queue is bounded. Where the caller does not read, the stages stop stepping this request, and
    only this one, until `on_space` wakes them. `changed` is the condition that the caller waits on;
    its lock guards every field.
    """

    def __init__(self, changed: threading.Condition, on_space: Callable[[], None]):
        self.changed, self._on_space = changed, on_space
        self._items: deque[Item] = deque()
        self._chunks = 0

    @property
    def has_space_for_token(self) -> bool:
        """True where the thinker's stage may put a token."""
        return len(self._items) - self._chunks < MAX_TOKENS

    @property
    def has_space_for_chunk(self) -> bool:
        """True where the vocoder's stage may put a chunk."""
        return self._chunks < MAX_CHUNKS

    def put(self, item: Item) -> None:
        """Append a token id, a chunk, or the text's end. The stage must have checked for space."""
        self._chunks += isinstance(item, AudioChunk)
        self._items.append(item)
        self.changed.notify_all()

    def take(self) -> Item | None:
        """Remove and return the oldest item. Returns None where there is none."""
        if not self._items:
            return None
        had_space = self.has_space_for_token and self.has_space_for_chunk
        item = self._items.popleft()
        self._chunks -= isinstance(item, AudioChunk)
        if not had_space:
            self._on_space()
        return item
