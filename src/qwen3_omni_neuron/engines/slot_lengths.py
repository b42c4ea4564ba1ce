"""Counts of a decoder's slots: rows of the KV cache that each one holds, and its next position."""

from collections.abc import Sequence


class SlotLengths:
    """Base of a target's engines.protocols.DecoderSlots, which counts rows and rope positions.

    slots: number of slots, all empty.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._lengths = [0] * slots
        self._next_positions = [0.0] * slots

    def _begin(self, slot: int, start: int) -> None:
        """Drop a slot's rows after the first `start`, which rows of a prompt will follow."""
        length = self._lengths[slot]
        assert start <= length, f"rows follow {start}, and slot {slot} holds {length}"
        # Only these rows are valid during the call, and after a call that raises.
        self._lengths[slot] = start

    def _end(self, slot: int, length: int, last_position: float) -> None:
        """Count a prompt's rows. last_position: largest rope position of them."""
        self._lengths[slot], self._next_positions[slot] = length, last_position + 1

    def _count_step(self, slots: Sequence[int]) -> None:
        """Count the row that a step has appended to each slot."""
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1
