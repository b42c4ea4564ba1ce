"""One request's events, made from the items of its output: text in whole characters, and audio."""

from collections.abc import Callable

from qwen3_omni_neuron.events import AudioChunk, TextDelta
from qwen3_omni_neuron.runtime.buffers import Item, TextEnd
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.stage import Clock
from qwen3_omni_neuron.runtime.stop_strings import INCOMPLETE


class RequestEvents:
    """Events of one request.

    before: text that its first text begins with.
    """

    def __init__(self, live: LiveRequest, clock: Clock, before: str = ""):
        self.live, self._clock = live, clock
        self._text = TextStream(live.request.codec.decode, before)
        self._told = 0  # tokens of the events so far

    def event_of(self, item: Item) -> TextDelta | AudioChunk | None:
        """Return the event of an item; None where it completes no character yet."""
        if isinstance(item, AudioChunk):
            return item
        delta = self._text.finish() if isinstance(item, TextEnd) else self._text.push(item)
        text, token_ids = delta
        if not token_ids:
            return None
        first, self._told = self._told, self._told + len(token_ids)
        return TextDelta(text, token_ids, self.live.logprobs[first : self._told])

    def take(self, since_s: float) -> tuple[Item | None, float | None]:
        """Take an item if there is one. The lock is held.

        since_s: when the wait began. Returns the item, None after the last one, and no time; or
        None and the time until the deadline, where the caller has to wait. Raises the error that
        ended the request.
        """
        live = self.live
        while True:
            if live.error is not None:
                raise live.error
            item = live.output.take()
            if item is not None or live.ended:
                return item, None
            remaining_s = live.deadline_s(since_s) - self._clock.now()
            if remaining_s > 0:
                return None, remaining_s
            live.end(live.late())

    def wait(self) -> Item | None:
        """Wait for the next item, and take it. Returns None after the last one."""
        changed, since_s = self.live.output.changed, self._clock.now()
        with changed:
            while True:
                item, remaining_s = self.take(since_s)
                if remaining_s is None:
                    return item
                changed.wait(remaining_s)

    def take_ready(self) -> list[Item]:
        """Take the items that are ready, up to a chunk. The next wait handles end and error."""
        items: list[Item] = []
        with self.live.output.changed:
            while self.live.error is None and not (items and isinstance(items[-1], AudioChunk)):
                item = self.live.output.take()
                if item is None:
                    break
                items.append(item)
        return items

    @property
    def at_end(self) -> bool:
        """True where the request has ended well, and all of its items were taken."""
        live = self.live
        with live.output.changed:
            return live.ended and live.error is None and not live.output.has_item


class TextStream:
    """Decoder of a growing reply, which returns whole characters.

    A character may be spelled by several tokens. decode: token ids to text, special tokens skipped.
    before: text that the first returned text begins with.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: str = ""):
        self._decode, self._before = decode, before
        self._held: list[int] = []

    def push(self, token_id: int) -> tuple[str, list[int]]:
        """Add a token. Returns the text that is now complete and its ids; both may be empty."""
        self._held.append(token_id)
        text = self._decode(self._held)
        if text.endswith(INCOMPLETE):
            return "", []
        return self._release(text)

    def finish(self) -> tuple[str, list[int]]:
        """Return the text of the tokens that are still held, incomplete characters included."""
        return self._release(self._decode(self._held)) if self._held else ("", [])

    def _release(self, text: str) -> tuple[str, list[int]]:
        ids, self._held = self._held, []
        text, self._before = self._before + text, ""
        return text, ids
