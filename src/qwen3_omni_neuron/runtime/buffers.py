"""Bounded buffers of a request: tokens for the talker, and events for the caller."""

import threading
from collections import deque
from collections.abc import Callable

from qwen3_omni_neuron.events import AudioChunk

CAPACITY = 1024


class TokenBuffer:
    """Token ids of the text rows of one request, in the order that the talker appends them.

    The rows are every token of the text, tts_eos once when the text has ended, and tts_pad from
    then on. changed: condition of the reader's stage, whose lock guards every field. on_space:
    wakes a writer that waits. written: number of tokens that were put. closed: the text has ended.
    end_taken: the reader has taken all of them, and tts_eos.
    """

    def __init__(
        self,
        changed: threading.Condition,
        on_space: Callable[[], None],
        eos_id: int,
        pad_id: int,
        capacity: int = CAPACITY,
    ):
        self._changed, self._on_space = changed, on_space
        self._eos_id, self._pad_id, self._capacity = eos_id, pad_id, capacity
        self._tokens: deque[int] = deque()
        self._wanted = 0  # tokens that the writer waits to put
        self.written = 0
        self.closed = self.end_taken = self._abandoned = False
        self._error: BaseException | None = None

    @property
    def has_space(self) -> bool:
        """True where the writer may put one more token, or the reader has left."""
        return self._abandoned or len(self._tokens) < self._capacity

    def may_put(self, tokens: int) -> bool:
        """Return whether the writer may put that many tokens; if not, `on_space` wakes it later."""
        space = self._abandoned or len(self._tokens) + tokens <= self._capacity
        self._wanted = 0 if space else tokens
        return space

    @property
    def ready(self) -> bool:
        """True where `take` would return a row or raise."""
        return bool(self._tokens) or self.closed

    def put(self, token_id: int) -> None:
        """Append a token. The writer has asked `may_put`.

        Of tokens that were held, more than the capacity may follow where it asked for all of it.
        """
        assert not self.closed, "a closed buffer takes no token"
        self.written += 1
        if self._abandoned:
            return
        self._tokens.append(token_id)
        self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """End the text, with the error that ended it, or None. Only the first call counts."""
        if not self.closed:
            self.closed, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Record that the reader has left: drop the tokens, and those put later."""
        self._abandoned = True
        self._tokens.clear()
        if self._wanted:
            self._on_space()

    def take_first(self) -> int | None:
        """Remove and return the first token of the text, None where the text is empty.

        The reader must have checked `ready`. Raises the error of `close`.
        """
        if self._error is not None:
            raise self._error
        return self._pop() if self._tokens else None

    def take(self) -> int:
        """Remove and return the token id of the next text row.

        The reader must have checked `ready`. Raises the error of `close`.
        """
        if self._error is not None:
            raise self._error
        if self._tokens:
            return self._pop()
        assert self.closed, "the reader must wait until the buffer is ready"
        if self.end_taken:
            return self._pad_id
        self.end_taken = True
        return self._eos_id

    def _pop(self) -> int:
        token_id = self._tokens.popleft()
        if self._wanted and self.may_put(self._wanted):
            self._on_space()
        return token_id


MAX_TOKENS = 1024
MAX_CHUNKS = 32  # each is at most 2 s


class TextEnd:
    """Item that follows the last token."""


Item = int | AudioChunk | TextEnd


class Output:
    """Tokens and audio chunks of one request, in the order they were made.

    The queue is bounded. Where the caller does not read, the stages stop stepping this request, and
    only this one, until `on_token_space` wakes the thinker's or `on_chunk_space` the vocoder's.
    `changed` is the condition that the caller waits on; its lock guards every field. on_change:
    called with the lock held wherever the condition is notified; for a caller that waits in an
    event loop.
    """

    def __init__(
        self,
        changed: threading.Condition,
        on_token_space: Callable[[], None],
        on_chunk_space: Callable[[], None],
    ):
        self.changed = changed
        self._on_token_space, self._on_chunk_space = on_token_space, on_chunk_space
        self._items: deque[Item] = deque()
        self._chunks = 0
        self._wanted = 0  # tokens that the thinker's stage waits to put
        self.on_change: Callable[[], None] | None = None

    @property
    def has_space_for_token(self) -> bool:
        """True where the thinker's stage may put a token."""
        return len(self._items) - self._chunks < MAX_TOKENS

    def may_put(self, tokens: int) -> bool:
        """Return whether the thinker's stage may put that many tokens, or is woken later."""
        space = len(self._items) - self._chunks + tokens <= MAX_TOKENS
        self._wanted = 0 if space else tokens
        return space

    @property
    def has_space_for_chunk(self) -> bool:
        """True where the vocoder's stage may put a chunk."""
        return self._chunks < MAX_CHUNKS

    @property
    def has_item(self) -> bool:
        """True where `take` would return an item."""
        return bool(self._items)

    @property
    def has_chunk(self) -> bool:
        """True where one of the items is a chunk."""
        return self._chunks > 0

    def put(self, item: Item) -> None:
        """Append a token id, a chunk, or the text's end. The stage must have checked for space."""
        self._chunks += isinstance(item, AudioChunk)
        self._items.append(item)
        self.notify()

    def notify(self) -> None:
        """Wake the caller: there is an item, or the request has ended. The lock is held."""
        self.changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def take(self) -> Item | None:
        """Remove and return the oldest item. Returns None where there is none."""
        if not self._items:
            return None
        had_space = self.has_space_for_chunk
        item = self._items.popleft()
        self._chunks -= isinstance(item, AudioChunk)
        if not had_space:
            self._on_chunk_space()
        if self._wanted and self.may_put(self._wanted):
            self._on_token_space()
        return item
