"""`qwen3-omni-neuron talk`: a conversation by microphone and loudspeaker, or from file to file."""

import argparse
import os
from pathlib import Path

from qwen3_omni_neuron.cli.model_arguments import add_model_arguments
from qwen3_omni_neuron.cli.parsing import CommandParser
from qwen3_omni_neuron.errors import NotInstalledError

KEY_VARIABLE = "QWEN3_OMNI_API_KEY"


def add_talk(parser: CommandParser) -> None:
    """Add the arguments of the verb."""
    parser.set_defaults(run=_talk)
    parser.add_examples(
        "talk",
        "talk --url http://127.0.0.1:8000 --hands-free",
        "talk --from question.wav --to answer.mp3",
    )
    text = "server to talk with, such as http://127.0.0.1:8000; default: a model here"
    parser.add_argument("--url", help=text)
    key = os.environ.get(KEY_VARIABLE, "")
    text = f"of the server; default: ${KEY_VARIABLE}"
    parser.add_argument("--api-key", default=key, metavar="KEY", help=text)
    text = "certificate of a server at https, or its authority's, that the system does not know"
    parser.add_argument("--ca", type=Path, metavar="FILE", help=text)
    text = "find turns by their silence, and let speech interrupt the answer; needs headphones"
    parser.add_argument("--hands-free", action="store_true", help=text)
    text = "speech of one turn, instead of the microphone"
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help=text)
    text = "where the answers go, instead of the loudspeaker: a name such as a.wav or a.mp3"
    parser.add_argument("--to", type=Path, metavar="FILE", help=text)
    parser.add_argument("--speaker", help="voice; default: that of the model, or of the server")
    add_model_arguments(parser, "the small one that ships with the package")


def _talk(parsed: argparse.Namespace) -> int:
    """Talk until the user ends it, or the file's turn is answered. Returns the exit status."""
    try:
        from qwen3_omni_neuron.cli.talk_client import talk

        return talk(parsed)
    except ImportError as error:
        message = f"talk: {error}. Run: pip install 'qwen3-omni-neuron[talk]'."
        raise NotInstalledError(message) from error
