"""`qwen3-omni-neuron talk`: a conversation by microphone and loudspeaker, or from file to file."""

import argparse
import os
import queue
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.errors import OptionError, Qwen3OmniError

if TYPE_CHECKING:
    from qwen3_omni_neuron.cli.talk_partners import Partner
    from qwen3_omni_neuron.cli.talk_sound import Samples, Sink

KEY_VARIABLE = "QWEN3_OMNI_API_KEY"
_TICK_S = 0.05


def add_talk(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.set_defaults(run=_talk)
    parser.add_argument(
        "--url", help="server to talk with, such as http://127.0.0.1:8000; default: a model here"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server; default: ${KEY_VARIABLE}")
    parser.add_argument(
        "--hands-free",
        action="store_true",
        help="find turns by their silence, and let speech interrupt the answer; needs headphones",
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="speech of one turn, instead of the microphone",
    )
    parser.add_argument(
        "--to", type=Path, metavar="WAV", help="where the answers go, instead of the loudspeaker"
    )
    parser.add_argument("--speaker", help="voice; default: the checkpoint's first one")
    add_model_arguments(parser, "the small one that ships with the package")


def _talk(parsed: argparse.Namespace) -> int:
    """Talk until the user ends it, or the file's turn is answered. Returns the exit status."""
    from qwen3_omni_neuron.cli import talk_sound

    turn = None if parsed.source is None else talk_sound.read_speech(parsed.source)
    if turn is not None and parsed.hands_free:
        raise OptionError("--from has one turn, so that there is nothing for --hands-free to find.")
    with ExitStack() as stack:
        sink: Sink
        if parsed.to is None:
            sink = stack.enter_context(talk_sound.loudspeaker())
        else:
            sink = talk_sound.FileSink(parsed.to)
            stack.enter_context(sink)
        talk = Talk(sink)
        partner = _partner(parsed, talk, stack)
        if turn is not None:
            partner.hear(turn)
            talk.end_turn(partner)
            talk.wait()
            sink.drain()
            return 0
        pieces: queue.Queue[Samples] = queue.Queue()
        stack.enter_context(talk_sound.microphone(pieces.put))
        pump = threading.Thread(target=talk.pump, args=(pieces, partner), daemon=True)
        pump.start()
        stack.callback(pump.join)
        stack.callback(talk.over.set)
        _converse(talk, partner, parsed.hands_free)
    return 0


def _partner(parsed: argparse.Namespace, talk: "Talk", stack: ExitStack) -> "Partner":
    from qwen3_omni_neuron.cli.talk_partners import ModelPartner, ServerPartner

    if parsed.url is not None:
        key = parsed.api_key or os.environ.get(KEY_VARIABLE, "")
        return stack.enter_context(
            ServerPartner(parsed.url, key, parsed.speaker, parsed.hands_free, talk)
        )
    from qwen3_omni_neuron.api import Qwen3Omni

    omni = stack.enter_context(
        Qwen3Omni.load(model_or_shipped(parsed), **load_arguments(parsed, slots=1))
    )
    return stack.enter_context(ModelPartner(omni, parsed.speaker, parsed.hands_free, talk))


def _converse(talk: "Talk", partner: "Partner", hands_free: bool) -> None:
    if hands_free:
        _say(
            "Speak. What your microphone hears interrupts the answer: use headphones. Ctrl-C ends."
        )
        talk.recording = True
        while not talk.over.wait(_TICK_S):
            pass
    else:
        _say("Enter: speak. Enter again: have it answered. Ctrl-D ends.")
        for _ in sys.stdin:
            if talk.over.is_set():
                break
            if talk.recording:
                talk.recording = False
                talk.end_turn(partner)
            else:
                partner.interrupt()
                talk.recording = True
                _say("Speaking; Enter ends it.")
    if talk.error is not None:
        raise talk.error


class Talk:
    """State of one conversation. Its partner calls it from a thread of its own.

    recording: what the microphone hears goes to the partner. over: set when the conversation can't
    go on, or is to end. error: that ended it.
    """

    def __init__(self, sink: "Sink"):
        self._sink = sink
        self.recording = False
        self.over = threading.Event()
        self.error: Qwen3OmniError | None = None
        self._answered = threading.Event()
        self._refused = False
        self._turn_end_s = 0.0
        self._first_sound_s: float | None = None

    def pump(self, pieces: "queue.Queue[Samples]", partner: "Partner") -> None:
        """Hand on what the microphone hears, until the conversation is over."""
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

    def end_turn(self, partner: "Partner") -> None:
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

    # What the partner tells.

    def turn_ended(self) -> None:
        """The user's turn has ended."""
        self._turn_end_s, self._first_sound_s = time.monotonic(), None
        self._answered.clear()

    def text(self, text: str) -> None:
        """Next part of the answer's text."""
        print(text, end="", flush=True)

    def sound(self, samples: "Samples") -> None:
        """Next samples of the answer."""
        if self._first_sound_s is None:
            self._first_sound_s = time.monotonic()
        self._sink.push(samples)

    def interrupted(self) -> float | None:
        """Be silent. Returns the seconds that were heard, None where all of it was."""
        return self._sink.interrupt()

    def answered(self) -> None:
        """The answer has ended, or was interrupted."""
        self._sink.end()
        print(flush=True)
        if self._first_sound_s is not None:
            _say(
                f"first sound {1000 * (self._first_sound_s - self._turn_end_s):.0f} ms after the "
                f"turn, {self._sink.underruns} underruns so far"
            )
        self._answered.set()

    def refused(self, why: str) -> None:
        """The turn can't be answered; the conversation goes on."""
        _say(why)
        self._refused = True
        self._answered.set()

    def failed(self, error: Qwen3OmniError) -> None:
        """The conversation can't go on."""
        self.error = self.error or error
        self.over.set()


def _say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
