"""`qwen3-omni-neuron say`: speak a text itself."""

import argparse
import sys

from qwen3_omni_neuron.cli.model_arguments import add_model_arguments
from qwen3_omni_neuron.cli.speak import add_options, add_out, write_speech

STDIN = "-"


def add_say(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb and a flag for each option that its requests have."""
    from qwen3_omni_neuron.options import REQUEST_OPTIONS, SpeechArguments

    parser.set_defaults(run=_say)
    parser.add_argument("text", help="the words to speak; - reads them from stdin")
    add_out(parser)
    add_model_arguments(parser, "the small one that ships with the package")
    names = SpeechArguments.__annotations__
    add_options(parser, [option for option in REQUEST_OPTIONS if option.name in names])


def _say(parsed: argparse.Namespace) -> int:
    """Speak one text. Returns the exit status."""
    text = sys.stdin.read() if parsed.text == STDIN else parsed.text
    return write_speech(
        parsed, lambda omni, options: omni.stream_speech(text, **options), shows_text=False
    )
