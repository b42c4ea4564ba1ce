"""Tokens of a conversation's images and videos, so that all of it fits into the context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.prompt.media.sizes import Sizes, VisualSize
from qwen3_omni_neuron.prompt.truncation import (
    ConversationPart,
    Message,
    Truncation,
    begins_of,
    kept_messages,
    reply_room,
    with_media,
)

_STEPS = 16  # text is counted in steps of 1/16 of the context
_VIDEO_SHARES = 4  # a video is shrunk to four times an image's tokens


@dataclass(frozen=True)
class Fitted:
    """Messages that a prompt keeps of a conversation, and the shares of its media.

    begin, media_begin: indices of the first message that is kept after the instructions, and of the
    first medium that is kept; 0: all are. shares: most tokens of each image and video that is kept,
    and the tokens of each sound, in their order.
    """

    begin: int
    media_begin: int
    shares: Sequence[int]

    def messages(self, whole: Sequence[Message]) -> list[Message]:
        """Return the messages that are kept of all."""
        return kept_messages(whole, self.begin) if self.begin else list(whole)


@dataclass(frozen=True)
class Room:
    """Tokens that a conversation leaves for its images and videos.

    most: if the items, shrunk as far as they may be, take more tokens, they are refused. whole: if
    the items take no more than this, none is shrunk. shared: otherwise they are shrunk to this
    number, or as near to it as they may be.
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

    def fit(self, sizes: Sizes, media: Sequence[VisualSize | int]) -> Fitted:
        """Return the shares of a conversation's media.

        media: in order, the sizes of images and videos, and the tokens of sounds; those that are
        not known yet are 0. Raises the errors of `shares`.
        """
        heard = sum(medium for medium in media if isinstance(medium, int))
        seen = [medium for medium in media if not isinstance(medium, int)]
        given = iter(shares(sizes, seen, self.without(heard)))
        return Fitted(0, 0, [m if isinstance(m, int) else next(given) for m in media])


@dataclass(frozen=True)
class TurnsRoom:
    """Room for media in a conversation whose oldest turns may be dropped.

    instructions: tokens of the system message and the tools. parts: the rest of the conversation,
    with the tokens of its text. most_tokens, reply_tokens: see `Room.beside`.
    """

    truncation: Truncation
    instructions: int
    parts: Sequence[ConversationPart]
    most_tokens: int
    reply_tokens: int

    def fit(self, sizes: Sizes, media: Sequence[VisualSize | int]) -> Fitted:
        """Return which messages stay, and the shares of their media. Arguments: see `Room.fit`.

        Turns are dropped as if images and videos took what they need, but at most half of the room
        beside the last turn. Those that stay then share all that the kept turns leave. So old turns
        neither shrink a new image much, nor does a large image drop them at once.
        """
        last = [0, *begins_of(self.parts)][-1]
        heard = sum(m for m in media[self.parts[last].media_begin :] if isinstance(m, int))
        half = self._beside(last).without(heard).shared // 2
        seen = [0 if isinstance(medium, int) else medium for medium in media]
        tokens = [medium if isinstance(medium, int) else 0 for medium in media]
        first, kept = -1, 0
        while kept > first:
            first, begin = kept, self.parts[kept].media_begin
            fitted = Room(math.inf, half, half).fit(sizes, seen[begin:])
            for at, share in enumerate(fitted.shares, begin):
                medium = seen[at]
                if not isinstance(medium, int):
                    tokens[at] = _tokens(sizes, medium, share) + medium.sound_tokens
            parts = with_media(self.parts, tokens)
            kept = max(first, self.truncation.first_kept(self.instructions, parts))
        room = self._beside(first) if first == last else self._beside_turns(first, half)
        fitted = room.fit(sizes, media[begin:])
        return replace(fitted, begin=self.parts[first].begin if first else 0, media_begin=begin)

    def _beside(self, first: int) -> Room:
        """Return the room beside the text from a part on, before any sound is counted."""
        text = self.instructions + sum(part.tokens for part in self.parts[first:])
        return Room.beside(text, self.most_tokens, self.reply_tokens)

    def _beside_turns(self, first: int, least: int) -> Room:
        """Return the room with which no more turns are dropped. least: shared in any case."""
        text = sum(part.tokens for part in self.parts[first:])
        left = max(0, self.truncation.most_after(self.instructions) - text)
        return Room(left, left, min(left, max(least, self._beside(first).shared)))


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
        given = zip(items, shared(most), strict=True)
        return sum(_tokens(sizes, item, share) for item, share in given)

    low, high = 0, max(own) + 1  # `low` fits, or is the least; `high` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= room.shared else (low, middle)
    return shared(low)


def _tokens(sizes: Sizes, item: VisualSize, share: int) -> int:
    """Return the tokens of an image or video that has a share, without its sound."""
    limited = replace(item, asked=replace(item.asked, most_tokens=share))
    return sizes.tokens(sizes.grid(limited))


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
