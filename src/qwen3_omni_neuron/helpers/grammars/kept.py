"""Grammars that stay compiled in the child that replies share, for the next reply that has one."""

from collections import Counter
from typing import NamedTuple

KEPT, KEPT_BYTES = 32, 64 << 20  # most grammars that are kept without a reply


class _Tried(NamedTuple):
    """Grammar that was tried. size: bytes of the child's memory."""

    number: int
    size: int


class KeptGrammars:
    """Numbers of the grammars that the shared child has to know: of replies, and kept for the next.

    Kept by owner and rules, the longest unused first: no owner learns what another has sent. The
    pool's lock guards it. Methods return the numbers that are not needed any more.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bytes], _Tried] = {}
        self._users = Counter[int]()  # replies of each grammar

    def take(self, owner: str, rules: bytes) -> tuple[int, int] | None:
        """Return the number and bytes of a grammar for another reply; None where it is not kept."""
        tried = self._kept.pop((owner, rules), None)
        if tried is not None:
            self._kept[owner, rules] = tried
            self._users[tried.number] += 1
        return tried

    def add(self, owner: str, rules: bytes, number: int, size: int) -> list[int]:
        """Add a grammar that was tried, for its first reply, and drop those without a place."""
        self._kept[owner, rules] = _Tried(number, size)
        self._users[number] += 1
        dropped = []
        while len(self._kept) > KEPT or self._size() > KEPT_BYTES:
            dropped.append(self._kept.pop(next(iter(self._kept))).number)
        return self._unneeded(dropped)

    def drop(self, number: int) -> list[int]:
        """Keep a grammar no longer than its replies: it was not as quick as when it was tried."""
        for key in [key for key, tried in self._kept.items() if tried.number == number]:
            del self._kept[key]
        return self._unneeded([number])

    def release(self, number: int) -> list[int]:
        """Note that a reply has ended."""
        self._users[number] -= 1
        return self._unneeded([number])

    def _size(self) -> int:
        return sum(len(rules) + tried.size for (_, rules), tried in self._kept.items())

    def _unneeded(self, numbers: list[int]) -> list[int]:
        kept = {tried.number for tried in self._kept.values()}
        free = [number for number in numbers if number not in kept and self._users[number] <= 0]
        for number in free:
            del self._users[number]
        return free
