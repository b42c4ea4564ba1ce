"""Responses and spoken replies, stored for later requests of the same owner."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from qwen3_omni_neuron.serving.edge.quotas import Account, Quota
from qwen3_omni_neuron.serving.openai.errors import ApiError

_RESPONSE_BYTES, _ITEM_BYTES = 1 << 10, 1 << 8  # overhead of a response and of an item
MOST_CHARACTERS = 4 << 20  # in all transcripts of spoken replies
Value = TypeVar("Value")


@dataclass
class _Entry(Generic[Value]):
    """Stored value. others: its other names. until: expiry."""

    value: Value
    size: int
    others: tuple[str, ...]
    until: float


class BoundedStore(Generic[Value]):
    """Values by owner and name, limited in bytes, number and age.

    An owner has at most a share of bytes and number. A new value evicts the least recently used,
    its owner's first. All bytes also count in the quota of requests and sessions, if any; a value
    beyond it is not stored. A lock guards all fields.
    """

    def __init__(
        self,
        most: int,
        seconds: float,
        most_bytes: int,
        share: float,
        held: Quota | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """share: largest fraction per owner. held: quota of all bytes."""
        self._most, self._most_bytes, self._share = most, most_bytes, share
        self._seconds, self._held, self._now = seconds, held, now
        self._lock = threading.RLock()
        # In the order of last use, hence of expiry.
        self._kept: OrderedDict[tuple[str, str], _Entry[Value]] = OrderedDict()
        self._named: dict[tuple[str, str], str] = {}  # by owner and other name
        self._bytes, self._number = Counter[str](), Counter[str]()

    @property
    def largest(self) -> int:
        """Upper bound of one value's bytes."""
        return int(self._most_bytes * self._share)

    @property
    def bytes_held(self) -> int:
        """Bytes of all values."""
        return self._bytes.total()

    def add(
        self, owner: str, name: str, value: Value, size: int, others: Iterable[str] = ()
    ) -> None:
        """Store a value for an owner, if it fits. others: its other names."""
        with self._lock:
            self._expire()
            if size > self.largest:
                return
            while self._number[owner] and (
                self._bytes[owner] + size > self.largest
                or self._number[owner] + 1 > self._most * self._share
            ):
                self._forget(next(key for key in self._kept if key[0] == owner))
            while self._kept and (
                self._bytes.total() + size > self._most_bytes or len(self._kept) >= self._most
            ):
                self._forget(next(iter(self._kept)))
            if self._held is not None:
                try:
                    self._held.take(owner, size)
                except ApiError:
                    return
            entry = _Entry(value, size, tuple(others), self._now() + self._seconds)
            self._kept[owner, name] = entry
            self._named |= {(owner, other): name for other in entry.others}
            self._bytes[owner] += size
            self._number[owner] += 1

    def get(self, owner: str, name: str) -> Value | None:
        """Return an owner's value by one of its names, or None."""
        with self._lock:
            self._expire()
            entry = self._kept.get((owner, self._named.get((owner, name), name)))
            return None if entry is None else entry.value

    def use(self, owner: str, name: str) -> Value | None:
        """Do `get`, and restart the value's retention."""
        with self._lock:
            self._expire()
            entry = self._kept.get((owner, name))
            if entry is None:
                return None
            self._kept.move_to_end((owner, name))
            entry.until = self._now() + self._seconds
            return entry.value

    def delete(self, owner: str, name: str) -> bool:
        """Delete a value. Returns whether the owner had it."""
        with self._lock:
            self._expire()
            if (owner, name) not in self._kept:
                return False
            self._forget((owner, name))
            return True

    def _expire(self) -> None:
        while self._kept:
            key, entry = next(iter(self._kept.items()))
            if entry.until > self._now():
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        owner, _ = key
        entry = self._kept.pop(key)
        for other in entry.others:
            del self._named[owner, other]
        if self._held is not None:
            self._held.give_back(owner, entry.size)
        self._bytes[owner] -= entry.size
        self._number[owner] -= 1
        if not self._number[owner]:
            del self._bytes[owner], self._number[owner]


@dataclass(frozen=True)
class KeptResponse:
    """One complete response, each part as JSON.

    previous: id of the response that it continues. input, output: its own items by id. listed: its
    new input items as list_input_items shows them, by their ids there.
    """

    body: bytes
    previous: str | None
    input: dict[str, bytes]
    output: dict[str, bytes]
    listed: dict[str, bytes]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        items = [*self.input.values(), *self.output.values()]
        objects = _RESPONSE_BYTES + _ITEM_BYTES * (len(items) + len(self.listed))
        return len(self.body) + sum(map(len, items)) + objects


class KeptResponses(BoundedStore[KeptResponse]):
    """Responses that later turns may name by their ids or their items' ids.

    A turn counts as a use of all earlier responses, so that a continued conversation stays whole.
    """

    def keep(self, owner: str, response_id: str, response: KeptResponse) -> None:
        """Store a response for an owner, if it fits."""
        self.add(owner, response_id, response, response.size, response.output)

    def conversation(self, owner: str, response_id: str) -> list[KeptResponse] | None:
        """Return the responses of a conversation up to one, in order.

        None if the owner lacks one of them.
        """
        turns = list[KeptResponse]()
        with self._lock:
            name: str | None = response_id
            while name is not None:
                # The first response is used last, so that a conversation loses its end first.
                found = self.use(owner, name)
                if found is None:
                    return None
                turns.append(found)
                name = found.previous
        return turns[::-1]

    def item(self, owner: str, item_id: str) -> bytes | None:
        """Return an owner's item of a response in JSON, or None."""
        found = self.get(owner, item_id)
        return None if found is None else found.output.get(item_id)


class LastResponse:
    """A socket's last response and the turns before it; `store: false` stores it only here."""

    def __init__(self, account: Account):
        self._account, self._id = account, ""
        self._turns: list[KeptResponse] = []

    def keep(self, response_id: str, turns: list[KeptResponse]) -> None:
        """Store a response, the last of `turns`, if it fits."""
        self._account.release(self._account.held)
        self._id, self._turns = "", []
        with suppress(ApiError):
            self._account.hold(sum(turn.size for turn in turns))
            self._id, self._turns = response_id, turns

    def conversation(self, response_id: str) -> list[KeptResponse]:
        """Return the turns up to a response; none for another one."""
        return self._turns if response_id == self._id else []


class SpokenReplies(BoundedStore[str]):
    """Transcripts of spoken replies by their audio's id: the model reads only the text."""

    def __init__(self, most: int, seconds: float, share: float):
        """share: largest fraction of replies and characters per owner."""
        super().__init__(most, seconds, MOST_CHARACTERS, share)

    def named(self, completion_id: str) -> tuple[str, int]:
        """Return a new reply's id, derived from completion_id, and expiry in Unix seconds."""
        return f"audio_{completion_id.removeprefix('chatcmpl-')}", int(time.time() + self._seconds)

    def keep(self, audio_id: str, owner: str, transcript: str) -> None:
        """Store a complete reply's transcript for `owner`."""
        self.add(owner, audio_id, transcript, len(transcript))
