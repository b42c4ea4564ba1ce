"""State of one conversation of `talk`, between the user and a partner who answers."""

import queue
import sys
import threading
import time
from typing import Protocol

from qwen3_omni_neuron.cli.talk_sound import Samples, Sink
from qwen3_omni_neuron.errors import OptionError, Qwen3OmniError

_TICK_S = 0.05


class Partner(Protocol):
    """Other side of a conversation. It reports its answers to a Talk."""

    def hear(self, samples: Samples) -> None:
        """Add samples of the user's sound, at HEARD_RATE."""

    def answer(self) -> None:
        """End the user's turn and answer it."""

    def interrupt(self) -> None:
        """Stop the answer, and record how much of it was heard."""


class Talk:
    """State of one conversation. Its partner calls it from a thread of its own.

    recording: the microphone's sound goes to the partner. by_hand: the user ends turns by Enter.
    over: set when the conversation can't go on, or is to end. error: the error that ended it.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self.recording = self.by_hand = False
        self.over = threading.Event()
        self.error: Qwen3OmniError | None = None
        self._answered = threading.Event()
        self._refused = False
        self._turn_end_s = 0.0
        self._first_sound_s: float | None = None

    def pump(self, pieces: queue.Queue[Samples], partner: Partner) -> None:
        """Pass the microphone's sound to the partner until the conversation is over."""
        try:
            while not self.over.is_set():
                try:
                    samples = pieces.get(timeout=_TICK_S)
                except queue.Empty:
                    continue
                if self.recording:
                    partner.hear(samples)
        except Qwen3OmniError as error:
            self.failed(error)

    def end_turn(self, partner: Partner) -> None:
        """End the user's turn by hand, and have it answered."""
        self.turn_ended()
        try:
            partner.answer()
        except Qwen3OmniError as error:
            self.refused(str(error))

    def wait(self) -> None:
        """Wait until the turn is answered. Raises the error that ended the conversation."""
        while not (self._answered.wait(_TICK_S) or self.over.is_set()):
            pass
        if self.error is not None:
            raise self.error
        if self._refused:
            raise OptionError("the turn was not answered, and nothing is written.")

    # Reports of the partner.

    def turn_ended(self) -> None:
        """Note that the user's turn has ended."""
        self._turn_end_s, self._first_sound_s = time.monotonic(), None
        self._answered.clear()

    def text(self, text: str) -> None:
        """Print the next part of the answer's text."""
        print(text, end="", flush=True)

    def sound(self, samples: "Samples") -> None:
        """Play the next samples of the answer."""
        if self._first_sound_s is None:
            self._first_sound_s = time.monotonic()
        self._sink.push(samples)

    def interrupted(self) -> float | None:
        """Stop playback. Returns the seconds that were heard, None if all were."""
        return self._sink.interrupt()

    def answered(self) -> None:
        """Note that the answer has ended, or was interrupted."""
        self._sink.end()
        print(flush=True)
        if self._first_sound_s is not None:
            say(
                f"first sound {1000 * (self._first_sound_s - self._turn_end_s):.0f} ms after the "
                f"turn, {self._sink.underruns} underruns so far"
            )
        self._answered.set()

    def refused(self, why: str) -> None:
        """Report that the turn can't be answered; the conversation goes on."""
        say(why)
        self._refused = True
        self._answered.set()

    def failed(self, error: Qwen3OmniError) -> None:
        """End the conversation, which can't go on."""
        if self.by_hand and self.error is None:  # the thread that waits for Enter can't be woken
            say("The conversation has ended: press Enter.")
        self.error = self.error or error
        self.over.set()


def say(text: str) -> None:
    """Show the user a message that is not part of an answer."""
    print(f"[{text}]", file=sys.stderr, flush=True)
