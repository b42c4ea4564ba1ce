"""Responses that a later turn may refer to by their ids, or by those of their items."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qwen3_omni_neuron.serving.edge.quotas import Quota
from qwen3_omni_neuron.serving.openai.errors import ApiError

_OBJECTS_BYTES = 1 << 10  # Python objects of one response and of each of its items


@dataclass(frozen=True)
class KeptResponse:
    """One complete response.

    body: the response, in JSON. previous: id of the response that it continues. input: items of its
    own input, in JSON, without brackets. output: items of its output by their ids, in JSON.
    """

    body: bytes
    previous: str | None
    input: bytes
    output: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        items = sum(map(len, self.output.values()))
        objects = _OBJECTS_BYTES * (1 + len(self.output))
        return len(self.body) + len(self.input) + items + objects

    @property
    def turn(self) -> bytes:
        """Items of its own input and its output, in JSON, without brackets."""
        return b",".join(part for part in (self.input, *self.output.values()) if part)


class KeptResponses:
    """Memory of responses, each for its owner alone, limited in bytes, in number and in time.

    An owner may have a share of the bytes and of the number. What is too much takes the place of
    what was not used for the longest time: first a response of the same owner, then any. All bytes
    count towards the quota of requests and sessions, too; what does not fit there is not kept. A
    turn uses all responses before it, so that a conversation that goes on is kept whole.
    A lock guards all fields.
    """

    def __init__(
        self,
        most: int,
        seconds: float,
        most_bytes: int,
        share: float,
        held: Quota,
        now: Callable[[], float] = time.monotonic,
    ):
        """share: fraction that one owner may have. held: quota of all bytes."""
        self._most, self._most_bytes, self._share = most, most_bytes, share
        self._seconds, self._held, self._now = seconds, held, now
        self._lock = threading.Lock()
        # By owner and id, in the order of their last use, with the time until which each is kept.
        self._kept: OrderedDict[tuple[str, str], tuple[KeptResponse, float]] = OrderedDict()
        self._response_of_item: dict[tuple[str, str], str] = {}
        self._bytes, self._number = Counter[str](), Counter[str]()

    @property
    def largest(self) -> int:
        """Most bytes of one response with its input."""
        return int(self._most_bytes * self._share)

    @property
    def bytes_held(self) -> int:
        """Bytes of all responses."""
        return self._bytes.total()

    def keep(self, owner: str, response_id: str, response: KeptResponse) -> None:
        """Keep a response for an owner, unless there is no room."""
        size = response.size
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
            try:
                self._held.take(owner, size)
            except ApiError:
                return
            self._kept[owner, response_id] = response, self._now() + self._seconds
            self._response_of_item |= {(owner, name): response_id for name in response.output}
            self._bytes[owner] += size
            self._number[owner] += 1

    def body(self, owner: str, response_id: str) -> bytes | None:
        """Return a response in JSON; None if it is not kept, or for another owner."""
        with self._lock:
            self._expire()
            found = self._kept.get((owner, response_id))
            return None if found is None else found[0].body

    def conversation(
        self, owner: str, response_id: str, *, whole: bool = True
    ) -> list[bytes] | None:
        """Return the turns of a conversation up to a response, as `KeptResponse.turn`.

        whole: with the output of the response itself. None if one of its responses is not kept, or
        for another owner.
        """
        turns, until = list[bytes](), self._now() + self._seconds
        with self._lock:
            self._expire()
            name: str | None = response_id
            while name is not None:
                found = self._kept.get((owner, name))
                if found is None:
                    return None
                # Last used is the first response, so that a conversation loses its end first.
                self._kept[owner, name] = found[0], until
                self._kept.move_to_end((owner, name))
                turns.append(found[0].turn if turns or whole else found[0].input)
                name = found[0].previous
        return [turn for turn in reversed(turns) if turn]

    def item(self, owner: str, item_id: str) -> bytes | None:
        """Return an item of a response in JSON; None if it is not kept, or for another owner."""
        with self._lock:
            self._expire()
            response_id = self._response_of_item.get((owner, item_id))
            if response_id is None:
                return None
            return self._kept[owner, response_id][0].output[item_id]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response. Returns whether it was kept for this owner."""
        with self._lock:
            self._expire()
            if (owner, response_id) not in self._kept:
                return False
            self._forget((owner, response_id))
            return True

    def _expire(self) -> None:
        while self._kept:
            key = next(iter(self._kept))
            if self._kept[key][1] > self._now():
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        owner, _ = key
        response, _ = self._kept.pop(key)
        for name in response.output:
            del self._response_of_item[owner, name]
        self._held.give_back(owner, response.size)
        self._bytes[owner] -= response.size
        self._number[owner] -= 1
        if not self._number[owner]:
            del self._bytes[owner], self._number[owner]
