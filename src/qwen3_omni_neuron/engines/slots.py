"""Bases of a decoder's slots, which count KV rows, and of the engines over them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Fault, HostRows, KvSlots


class SlotLengths:
    """Base of a target's engines.protocols.DecoderSlots, which counts rows and rope positions.

    slots: number of slots, all empty.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._lengths = [0] * slots
        self._next_positions = [0.0] * slots

    @property
    def host_rows(self) -> HostRows | None:
        """Return None: rows are not copied to the host; see KvSlots."""
        return None

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


class DecoderEngine:
    """Base of the thinker's and the talker's engine; see engines.protocols.

    release: called by `close`; frees what the parts hold besides memory. fault: see
    engines.protocols.Fault; None where the parts are in this process.
    """

    def __init__(
        self,
        decoder: KvSlots,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self.chunked_prefill = decoder.chunked_prefill
        self._kv_slots, self._host_rows = decoder, decoder.host_rows
        self.row_bytes = self._host_rows.row_bytes if self._host_rows else 0
        self._release, self.fault = release, fault

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see Thinker.copy."""
        self._kv_slots.copy(source, target, rows)

    @torch.inference_mode()
    def read_rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Copy rows of a slot to the host's memory; see HostRows."""
        assert self._host_rows is not None
        return self._host_rows.read_rows(slot, start, stop)

    @torch.inference_mode()
    def write_rows(self, slot: int, start: int, rows: Tensor) -> None:
        """Copy rows back into a slot; see HostRows."""
        assert self._host_rows is not None
        self._host_rows.write_rows(slot, start, rows)

    def close(self) -> None:
        """Release the parts' resources; see Thinker.close."""
        self._release()
