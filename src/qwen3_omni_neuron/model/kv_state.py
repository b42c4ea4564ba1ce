"""KV caches of graphs whose shapes are fixed: lines come in as values and go out as values.

What kv_cache does in place, for a compiled graph whose state is aliased to its outputs. The lines
of a decoder are `KvLines`; each way keeps what it leaves in `left`, in the same order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

KvLines = tuple[Tensor, ...]
"""Keys of layer 0, values of layer 0, keys of layer 1, ...: each [slots, kv_heads, positions,
head_dim]."""


class PromptState:
    """Prefill: the prompt's rows fill one line from position 0 and see each other.

    slot: int64 [1], which line. Behind the rows the line becomes zeros.
    """

    mask = None

    def __init__(self, lines: KvLines, slot: Tensor):
        self._lines, self._slot = lines, slot
        self.left: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: [kv_heads, rows, head_dim]."""
        for held, new in zip(self._lines[2 * layer :], (keys, values), strict=False):
            line = F.pad(new, (0, 0, 0, held.shape[2] - new.shape[1]))
            self.left.append(held.index_copy(0, self._slot, line.unsqueeze(0)))
        return keys, values


class StepState:
    """Decode: one row a slot, written at that slot's own position.

    slots: int64 [n], which lines. lengths: int64 [n], the positions that the new rows are written
    to, or -1 for an idle row, which leaves its line as it is and reads position 0, so that its
    result, which means nothing, is a number. window: how many positions are read; every length is
    below it.
    """

    def __init__(self, lines: KvLines, slots: Tensor, lengths: Tensor, window: int):
        self._lines, self._slots, self._window = lines, slots, window
        self._idle = (lengths < 0)[:, None, None]
        self._at = lengths.clamp(min=0)
        positions = torch.arange(window, device=lengths.device)
        self.mask = (positions > self._at[:, None])[:, None, None, :]
        self.left: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: [n * kv_heads, 1, head_dim]."""
        held_keys, held_values = self._lines[2 * layer : 2 * layer + 2]
        return self._put(held_keys, keys), self._put(held_values, values)

    def _put(self, held: Tensor, rows: Tensor) -> Tensor:
        """Returns [n * kv_heads, window, head_dim] with the rows [n * kv_heads, 1, head_dim]."""
        _, heads, _, width = held.shape
        head = torch.arange(heads, device=held.device)[None]
        where = self._slots[:, None], head, self._at[:, None]
        new = torch.where(self._idle, held[where], rows.view(-1, heads, width))
        lines = held.index_put(where, new)
        self.left.append(lines)
        return lines[:, :, : self._window].index_select(0, self._slots).flatten(0, 1)
