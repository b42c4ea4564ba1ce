"""`qwen3-omni-neuron talk`: a conversation by microphone and loudspeaker, or from file to file."""

import argparse
import os
import queue
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.errors import OptionError

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
    parser.add_argument("--speaker", help="voice; default: that of the model, or of the server")
    add_model_arguments(parser, "the small one that ships with the package")


def _talk(parsed: argparse.Namespace) -> int:
    """Talk until the user ends it, or the file's turn is answered. Returns the exit status."""
    from qwen3_omni_neuron.cli.talk_sound import FileSink, loudspeaker, microphone, read_speech

    turn = None if parsed.source is None else read_speech(parsed.source)
    if turn is not None and parsed.hands_free:
        raise OptionError("--from has one turn, so that there is nothing for --hands-free to find.")
    with ExitStack() as stack:
        sink: Sink
        if parsed.to is None:
            sink = stack.enter_context(loudspeaker())
        else:
            sink = FileSink(parsed.to)
            stack.enter_context(sink)
        partner = _partner(parsed, sink, stack)
        stack.callback(partner.close)
        if turn is not None:
            partner.hear(turn)
            partner.end_turn()
            partner.wait()
            sink.drain()
            return 0
        pieces: queue.Queue[Samples] = queue.Queue()
        stack.enter_context(microphone(pieces.put))
        pump = threading.Thread(target=partner.pump, args=(pieces,), daemon=True)
        pump.start()
        stack.callback(pump.join)
        stack.callback(partner.over.set)
        _converse(partner, parsed.hands_free)
    return 0


def _partner(parsed: argparse.Namespace, sink: "Sink", stack: ExitStack) -> "Partner":
    from qwen3_omni_neuron.cli.talk_partners import ModelPartner, ServerPartner

    if parsed.url is not None:
        key = parsed.api_key or os.environ.get(KEY_VARIABLE, "")
        return ServerPartner(parsed.url, key, parsed.speaker, parsed.hands_free, sink)
    from qwen3_omni_neuron.api import Qwen3Omni

    omni = Qwen3Omni.load(model_or_shipped(parsed), **load_arguments(parsed, slots=1))
    return ModelPartner(stack.enter_context(omni), parsed.speaker, parsed.hands_free, sink)


def _converse(partner: "Partner", hands_free: bool) -> None:
    from qwen3_omni_neuron.cli.talk_partners import say

    if hands_free:
        say("Speak. What your microphone hears interrupts the answer: use headphones. Ctrl-C ends.")
        partner.recording = True
        while not partner.over.wait(_TICK_S):
            pass
    else:
        partner.by_hand = True
        say("Enter: speak. Enter again: have it answered. Ctrl-D ends.")
        for _ in sys.stdin:
            if partner.over.is_set():
                break
            if partner.recording:
                partner.recording = False
                partner.end_turn()
            else:
                partner.interrupt()
                partner.recording = True
                say("Speaking; Enter ends it.")
    if partner.error is not None:
        raise partner.error
