"""Quotas of a resource, such as memory: in total, and per API key or address."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError

RECENT_S = 1.0  # an owner still counts after a request


class Quota:
    """Amounts of a resource used by owners. A lock guards all fields.

    what: plural name of the resource. most: total amount, or a function of it. share: largest
    fraction per owner. code, status: a refusal's; status: if the total is used up.
    """

    def __init__(
        self, what: str, most: int | Callable[[], int], share: float, code: str, status: int = 503
    ):
        self._what, self._share, self._code, self._status = what, share, code, status
        self._most = most if callable(most) else lambda: most
        self._lock = threading.Lock()
        self._by_owner: Counter[str] = Counter()
        self._left_s: OrderedDict[str, float] = OrderedDict()  # when owners released their last
        self.taken = 0

    def take(self, owner: str, amount: int = 1) -> None:
        """Reserve an amount. Raises ApiError, and reserves nothing, beyond the total or share."""
        with self._lock:
            most, own = self._most(), self._by_owner[owner] + amount
            most_of_owner = max(1, int(most * self._share))
            if self.taken + amount <= most and own <= most_of_owner:
                self._add(owner, amount)
                return
            taken = self.taken
        if taken + amount > most:
            whose, status = "all requests together have", self._status
        else:
            whose, status, taken, most = "this key or address has", 429, own - amount, most_of_owner
        raise ApiError(
            status,
            f"{whose} {taken} {self._what}, this needs {amount}; the limit is {most}. Try later.",
            self._code,
            retry_after_s=RETRY_S,
        )

    def add(self, owner: str, amount: int) -> None:
        """Count an amount already in use, beyond any limit."""
        with self._lock:
            self._add(owner, amount)

    def give_back(self, owner: str, amount: int = 1) -> None:
        """Release an amount."""
        with self._lock:
            self._add(owner, -amount)
            if not self._by_owner[owner]:
                del self._by_owner[owner]
                self._left_s[owner] = time.monotonic()
                self._left_s.move_to_end(owner)
                self._forget_left()

    def has_others(self, owner: str) -> bool:
        """Return whether another owner uses anything, or recently did."""
        with self._lock:
            self._forget_left()
            return any(other != owner for other in (*self._by_owner, *self._left_s))

    def crowds(self, owner: str) -> bool:
        """Return whether an owner has more than one while another has any."""
        return self._by_owner[owner] > 1 and self.has_others(owner)

    def place(self, owner: str) -> "Place":
        """Acquire one place. Raises ApiError."""
        self.take(owner)
        return Place(self, owner)

    def _forget_left(self) -> None:
        before_s = time.monotonic() - RECENT_S
        while self._left_s and next(iter(self._left_s.values())) < before_s:
            self._left_s.popitem(last=False)

    def _add(self, owner: str, amount: int) -> None:
        self._by_owner[owner] += amount
        self.taken += amount


class Place:
    """One unit of a quota, until `leave` or the end of a `with` block. For one thread."""

    def __init__(self, quota: Quota, owner: str):
        """Use `Quota.place` instead."""
        self._quota, self._owner, self._taken = quota, owner, True

    def leave(self) -> None:
        """Release the place. A second call does nothing."""
        if self._taken:
            self._taken = False
            self._quota.give_back(self._owner)

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Account:
    """Bytes reserved by one request or session, also in the quota of all bytes.

    Decoded bytes are reserved before allocation, until `close`. A lock guards all fields.
    """

    def __init__(self, quota: Quota, owner: str, most: int, refusal: Callable[[int], ApiError]):
        """most: limit in bytes. refusal: returns the error for this many bytes."""
        self._quota, self._owner, self._most, self._refusal = quota, owner, most, refusal
        self._lock = threading.Lock()
        self._closed = False
        self.held = 0

    def hold(self, size: int) -> None:
        """Reserve bytes. Raises ApiError, and reserves nothing, over a limit."""
        with self._lock:
            if self._closed:
                raise ApiError(400, "the client left.", "client_left")
            if self.held + size > self._most:
                raise self._refusal(self.held + size)
            self._quota.take(self._owner, size)
            self.held += size

    def add(self, size: int) -> None:
        """Count allocated bytes, such as the text of a reply."""
        with self._lock:
            if not self._closed:
                self._quota.add(self._owner, size)
                self.held += size

    def release(self, size: int) -> None:
        """Release bytes."""
        with self._lock:
            if not self._closed:
                self._quota.give_back(self._owner, size)
                self.held -= size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Reserve bytes during a `with` block. Raises ApiError."""
        self.hold(size)
        try:
            yield
        finally:
            self.release(size)

    def close(self) -> None:
        """Release everything."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._quota.give_back(self._owner, self.held)
                self.held = 0
