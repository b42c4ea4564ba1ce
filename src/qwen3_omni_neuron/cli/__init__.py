"""The command line, `qwen3-omni-neuron VERB`: a file for each verb, or for two alike."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from qwen3_omni_neuron.cli.ending import EndBySignal, leave, open_standard_files
from qwen3_omni_neuron.errors import ExitStatus, Qwen3OmniError


def run() -> NoReturn:
    """Run the verb of this process's command line, and end the process with its exit status."""
    ends = EndBySignal(serves=sys.argv[1:2] == ["serve"])
    status: int = ExitStatus.FAILED
    try:
        with ends:
            open_standard_files()
            status = main()
    except SystemExit as end:  # argparse's, which has printed what is wrong
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a library may have made another exception of KeyboardInterrupt
        if ends.status is None:
            traceback.print_exc()
    leave(status if ends.status is None else ends.status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status. Raises SystemExit for a wrong command line."""
    try:
        parsed = make_parser().parse_args(arguments)
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except Qwen3OmniError as error:
        print(f"qwen3-omni-neuron: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    except BrokenPipeError:
        # The reader is gone. The rest of stdout's buffer must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("qwen3-omni-neuron: nobody reads the output any more.", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print("qwen3-omni-neuron: interrupted.", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    # A signal is taken before these imports, which take a tenth of a second: see `run`.
    from qwen3_omni_neuron.cli.compile import add_compile
    from qwen3_omni_neuron.cli.doctor import add_doctor
    from qwen3_omni_neuron.cli.inspect import add_inspect
    from qwen3_omni_neuron.cli.serve import add_serve
    from qwen3_omni_neuron.cli.speak import add_say, add_speak
    from qwen3_omni_neuron.cli.storage import add_pull, add_push
    from qwen3_omni_neuron.cli.talk import add_talk
    from qwen3_omni_neuron.cli.tiny import add_tiny
    from qwen3_omni_neuron.cli.transcribe import add_transcribe
    from qwen3_omni_neuron.cli.verify import add_verify

    parser = argparse.ArgumentParser(
        prog="qwen3-omni-neuron", description="Qwen3-Omni listens, writes and speaks."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_speak(verbs.add_parser("speak", help="answer a question in text and speech"))
    add_say(verbs.add_parser("say", help="speak a text itself"))
    add_serve(verbs.add_parser("serve", help="answer over HTTP, as OpenAI's API does"))
    add_talk(verbs.add_parser("talk", help="talk with a model or a server, by microphone"))
    add_transcribe(verbs.add_parser("transcribe", help="write down the words of sound files"))
    add_compile(verbs.add_parser("compile", help="convert a checkpoint once, for one target"))
    add_inspect(verbs.add_parser("inspect", help="show what compile wrote, and verify it"))
    add_push(verbs.add_parser("push", help="copy what compile wrote to shared storage"))
    add_pull(verbs.add_parser("pull", help="copy it from there to this machine"))
    add_doctor(verbs.add_parser("doctor", help="report on this machine, to paste into an issue"))
    add_verify(verbs.add_parser("verify", help="compare a model with transformers, by stages"))
    add_tiny(verbs.add_parser("tiny-checkpoint", help="write a small checkpoint of random weights"))
    return parser
