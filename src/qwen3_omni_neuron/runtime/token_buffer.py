"""Text on its way from the thinker to the talker."""

import threading
from collections import deque
from collections.abc import Callable

CAPACITY = 1024


class TokenBuffer:
    """The text rows of one request, by their token ids, in the order that the talker adds them.

    The talker's rows are: every token, tts_eos once when the text has ended, then tts_pad for
    ever. The buffer is bounded, and it closes with the error that ended the text inside, so that
    neither can be seen without the other. A reader that finds nothing waits on `changed`, the
    condition of its stage, until the request's deadline; its lock guards every field. A writer that
    finds no room is woken by `on_room`.
    """

    def __init__(
        self,
        changed: threading.Condition,
        on_room: Callable[[], None],
        eos_id: int,
        pad_id: int,
        capacity: int = CAPACITY,
    ):
        self._changed, self._on_room = changed, on_room
        self._eos_id, self._pad_id, self._capacity = eos_id, pad_id, capacity
        self._tokens: deque[int] = deque()
        self._closed = self._abandoned = self._eos_taken = False
        self._error: BaseException | None = None

    @property
    def has_room(self) -> bool:
        """Whether the writer may put one more: always, where nobody reads."""
        return self._abandoned or len(self._tokens) < self._capacity

    @property
    def ready(self) -> bool:
        """Whether `take` has a row, or an error, to give."""
        return bool(self._tokens) or self._closed

    def put(self, token_id: int) -> None:
        """Append a token. The writer has seen `has_room`."""
        assert not self._closed, "a closed buffer takes no token"
        if self._abandoned:
            return
        assert len(self._tokens) < self._capacity, "the writer must wait for room"
        self._tokens.append(token_id)
        self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """End the text; with the error that ended it, if one did. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody reads any more: what is here is dropped, and so is what still comes."""
        self._abandoned = True
        self._tokens.clear()
        self._on_room()

    def take_first(self) -> int | None:
        """The first token of the text, or None where it ended without one. Once `ready`."""
        if self._error is not None:
            raise self._error
        return self._pop() if self._tokens else None

    def take(self) -> int:
        """The token id of the next text row, once `ready`. Raises the error of `close`."""
        if self._error is not None:
            raise self._error
        if self._tokens:
            return self._pop()
        assert self._closed, "the reader must wait until the buffer is ready"
        if self._eos_taken:
            return self._pad_id
        self._eos_taken = True
        return self._eos_id

    def _pop(self) -> int:
        token_id = self._tokens.popleft()
        if len(self._tokens) == self._capacity - 1:
            self._on_room()
        return token_id
