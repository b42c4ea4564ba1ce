"""What the stages have made of a request and its caller has not taken yet."""

import threading
from collections import deque
from collections.abc import Callable

from qwen3_omni_neuron.events import AudioChunk

MOST_TOKENS = 1024
MOST_CHUNKS = 32  # of at most 2 s each


class TextEnd:
    """The text is whole: what comes after it is sound."""


Item = int | AudioChunk | TextEnd


class Output:
    """Tokens and audio chunks of one request, in the order they were made; bounded.

    A caller that does not read holds up the stages of its own request, which step it only while
    there is room, and are woken by `on_room`. The lock of `changed`, the caller's condition, guards
    every field.
    """

    def __init__(self, changed: threading.Condition, on_room: Callable[[], None]):
        self.changed, self._on_room = changed, on_room
        self._items: deque[Item] = deque()
        self._chunks = 0

    @property
    def has_room_for_token(self) -> bool:
        return len(self._items) - self._chunks < MOST_TOKENS

    @property
    def has_room_for_chunk(self) -> bool:
        return self._chunks < MOST_CHUNKS

    def put(self, item: Item) -> None:
        """Append a token id, a chunk, or the text's end. The stage has seen that there is room."""
        self._chunks += isinstance(item, AudioChunk)
        self._items.append(item)
        self.changed.notify_all()

    def take(self) -> Item | None:
        """The oldest item, or None."""
        if not self._items:
            return None
        had_room = self.has_room_for_token and self.has_room_for_chunk
        item = self._items.popleft()
        self._chunks -= isinstance(item, AudioChunk)
        if not had_room:
            self._on_room()
        return item
