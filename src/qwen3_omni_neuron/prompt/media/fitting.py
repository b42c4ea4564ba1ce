"""Tokens of a conversation's images and videos, so that all of it fits into the context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.prompt.media.sizes import Sizes, VisualSize
from qwen3_omni_neuron.prompt.truncation import reply_room

_STEPS = 16  # text is counted in steps of 1/16 of the context
_VIDEO_SHARES = 4  # a video is shrunk to four times an image's tokens


@dataclass(frozen=True)
class Room:
    """Tokens that a conversation leaves for its images and videos.

    most: if the items, shrunk as far as they may be, take more tokens, they are refused. Infinity
    where turns can be dropped. whole: if the items take no more than this, none is shrunk. shared:
    otherwise they are shrunk to this number, or as near to it as they may be.
    """

    most: float
    whole: int
    shared: int

    @staticmethod
    def beside(text_tokens: int, most_tokens: int, reply_tokens: int) -> "Room":
        """Return the room beside a conversation's text.

        text_tokens: its tokens, with those of a template. most_tokens: longest prompt.
        reply_tokens: most tokens of the reply, for which `shared` leaves room.
        What is shrunk keeps its size for some turns of a conversation that goes on, and so its rows
        of the KV cache: for `shared` the text is counted in steps.
        """
        left = max(0, most_tokens - text_tokens)
        context = most_tokens + 1
        step = max(1, context // _STEPS)
        text = math.ceil(text_tokens / step) * step
        shared = max(0, most_tokens - text - reply_room(context, reply_tokens))
        return Room(left, left, shared)

    def without(self, tokens: int) -> "Room":
        """Return the room beside other media."""
        left = max(0, self.whole - tokens), max(0, self.shared - tokens)
        return Room(max(0, self.most - tokens), *left)

    @property
    def half(self) -> "Room":
        """Room for the items of one turn, where later turns may have others."""
        return replace(self, shared=self.shared // 2)


def shares(sizes: Sizes, items: Sequence[VisualSize], room: Room) -> list[int]:
    """Return the most tokens of each of a conversation's images and videos.

    If all of them fit, each has its own size. Otherwise those that may be shrunk share what the
    others leave: each gets as many tokens as it needs, or the same number as the others, a video
    four times that.
    Raises PromptTooLongError if they don't fit even when they are shrunk as far as they may be, and
    the errors of `Sizes`.
    """
    items = [replace(item, asked=replace(item.asked, most_tokens=None)) for item in items]
    sound = sum(item.sound_tokens for item in items)
    room = room.without(sound)
    own = [sizes.tokens(sizes.exact_grid(item)) for item in items]
    if sum(own) <= room.whole:
        return own
    least = [sizes.least_tokens(item) for item in items]
    if sum(least) > room.most:
        raise _too_many(sizes, items, least, room.most)
    weights = [1 if item.frames is None else _VIDEO_SHARES for item in items]

    def shared(most: int) -> list[int]:
        """Return the shares where none that may be shrunk is above so many tokens an image."""
        return [
            max(small, min(large, weight * most))
            for small, large, weight in zip(least, own, weights, strict=True)
        ]

    def taken(most: int) -> int:
        limited = (
            replace(item, asked=replace(item.asked, most_tokens=share))
            for item, share in zip(items, shared(most), strict=True)
        )
        return sum(sizes.tokens(sizes.grid(item)) for item in limited)

    low, high = 0, max(own) + 1  # `low` fits, or is the least; `high` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= room.shared else (low, middle)
    return shared(low)


def _too_many(
    sizes: Sizes, items: Sequence[VisualSize], least: Sequence[int], most: float
) -> PromptTooLongError:
    """Return the error for images and videos that can't be shrunk so far."""
    item, tokens = max(zip(items, least, strict=True), key=lambda pair: pair[1])
    shrunk = " when it is shrunk as far as it may be" if item.asked.shrinks else ""
    others = f", and all {len(items)} images and videos {sum(least)}" if len(items) > 1 else ""
    return PromptTooLongError(
        f"{item.where} is {item}, which makes {tokens} vision tokens{shrunk}{others}; {most} fit "
        f"into the context beside the rest. {sizes.advice(item, len(items) > 1)}"
    )
