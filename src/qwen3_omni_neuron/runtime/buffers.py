"""Bounded buffers of a request: tokens for the talker, and events for the caller."""

import threading
from collections import deque
from collections.abc import Callable

from qwen3_omni_neuron.events import AudioChunk

CAPACITY = 1024


class TokenBuffer:
    """Token ids of one request's text rows: its tokens, tts_eos once, then tts_pad.

    changed: condition of the reader's stage; its lock guards every field. on_space: wakes a waiting
    writer. written: number of tokens. closed: the text has ended. end_taken: tts_eos was consumed.
    """

    def __init__(
        self, changed: threading.Condition, on_space: Callable[[], None], eos_id: int, pad_id: int
    ):
        self._changed, self._on_space = changed, on_space
        self._eos_id, self._pad_id = eos_id, pad_id
        self._tokens: deque[int] = deque()
        self._wanted = 0
        self.written = 0
        self.closed = self.end_taken = self._abandoned = False
        self._error: BaseException | None = None

    @property
    def has_space(self) -> bool:
        """True if one more token fits."""
        return self._abandoned or len(self._tokens) < CAPACITY

    def may_put(self, tokens: int) -> bool:
        """Return whether these tokens fit; if not, `on_space` wakes the writer later."""
        space = self._abandoned or len(self._tokens) + tokens <= CAPACITY
        self._wanted = 0 if space else tokens
        return space

    @property
    def ready(self) -> bool:
        """True if `take` would return a row or raise."""
        return bool(self._tokens) or self.closed

    def put(self, token_id: int) -> None:
        """Append a token, after `may_put`."""
        assert not self.closed, "a closed buffer takes no token"
        self.written += 1
        if self._abandoned:
            return
        self._tokens.append(token_id)
        self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """End the text, with its error; later calls change nothing."""
        if not self.closed:
            self.closed, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Drop these and later tokens: the reader has gone."""
        self._abandoned = True
        self._tokens.clear()
        if self._wanted:
            self._on_space()

    def take_first(self) -> int | None:
        """Remove and return the first token; None if the text is empty."""
        if self._error is not None:
            raise self._error
        return self._pop() if self._tokens else None

    def take(self) -> int:
        """Return the next row's token id, if `ready`. Raises `close`'s error."""
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
MAX_CHUNKS = 32  # of at most 2 s each


class TextEnd:
    """End of the tokens."""


Item = int | AudioChunk | TextEnd


class Output:
    """Bounded queue of one request's tokens and audio chunks.

    A caller that does not read stalls its own request. The lock of `changed` guards every field.
    on_change: called whenever `changed` is notified, for an event loop.
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
        self._wanted = 0
        self.on_change: Callable[[], None] | None = None

    @property
    def has_space_for_token(self) -> bool:
        """True if a token fits."""
        return len(self._items) - self._chunks < MAX_TOKENS

    def may_put(self, tokens: int) -> bool:
        """Return whether these tokens fit; if not, the thinker's stage is woken later."""
        space = len(self._items) - self._chunks + tokens <= MAX_TOKENS
        self._wanted = 0 if space else tokens
        return space

    @property
    def has_space_for_chunk(self) -> bool:
        """True if a chunk fits."""
        return self._chunks < MAX_CHUNKS

    @property
    def has_item(self) -> bool:
        """True if `take` returns an item."""
        return bool(self._items)

    @property
    def has_chunk(self) -> bool:
        """True if an item is a chunk."""
        return self._chunks > 0

    def put(self, item: Item) -> None:
        """Append an item that fits."""
        self._chunks += isinstance(item, AudioChunk)
        self._items.append(item)
        self.notify()

    def notify(self) -> None:
        """Wake the caller. The lock is held."""
        self.changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def take(self) -> Item | None:
        """Remove and return the oldest item, or None."""
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
