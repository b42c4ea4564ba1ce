"""`qwen3-omni-neuron transcribe`: write down the speech of audio files, in their order."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from qwen3_omni_neuron.cli.model_arguments import (
    SHIPPED,
    add_model_arguments,
    add_option,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.cli.parsing import PROGRAM, STDIN, NamedFile, add_examples, with_flags
from qwen3_omni_neuron.errors import AudioError, ExitStatus
from qwen3_omni_neuron.options import LOAD_OPTIONS, REQUEST_OPTIONS

_CUT_TEXT = (
    "the text is incomplete: --max-new-tokens or --context-length cut a part of it. Raise them."
)


def add_transcribe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.set_defaults(run=_transcribe)
    add_examples(parser, "transcribe question.wav", "transcribe question.wav answer.wav --json")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="WAV, FLAC, OGG, MP3, WebM, MP4 or M4A files; - = stdin",
    )
    add_model_arguments(parser, SHIPPED)
    parser.add_argument(
        "--instruction",
        help="prompt sent with the audio; default: the checkpoint's, else a request to transcribe",
    )
    [limit] = [option for option in REQUEST_OPTIONS if option.name == "thinker_max_new_tokens"]
    text = "token limit per window (at most 30 s)"
    add_option(parser, replace(limit, flag="--max-new-tokens", help=text), limit.default)
    add_option(parser, LOAD_OPTIONS["context_length"])
    windows = replace(LOAD_OPTIONS["max_concurrency"], flag="--concurrency", shown="1")
    add_option(parser, replace(windows, help="concurrent windows"), 1)
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON per file, times in seconds"
    )
    parser.add_argument("--quiet", action="store_true", help="hide progress")


def _transcribe(parsed: argparse.Namespace) -> int:
    from tqdm import tqdm

    from qwen3_omni_neuron.transcription import Failure, Transcript, transcribe

    many, failed, cut = len(parsed.files) > 1, False, False
    shown = many and sys.stderr.isatty() and not parsed.quiet
    files = [sys.stdin.buffer.read() if name == STDIN else name for name in parsed.files]
    errors = _errors(files)
    with ExitStack() as stack:
        outcomes: Iterable[Transcript | Failure] = map(Failure, files, errors)
        if len(errors) < len(files):  # otherwise no model is needed
            model, load = model_or_shipped(parsed), load_arguments(parsed, parsed.max_concurrency)
            from qwen3_omni_neuron.api import Qwen3Omni  # imports torch

            omni = stack.enter_context(Qwen3Omni.load(model, **load))
            made = transcribe(
                omni,
                files,
                parsed.instruction,
                parsed.max_concurrency,
                parsed.thinker_max_new_tokens,
            )
            outcomes = stack.enter_context(closing(made))
        bar = stack.enter_context(tqdm(total=len(parsed.files), unit="file", disable=not shown))
        for name, outcome in zip(parsed.files, outcomes, strict=True):
            if isinstance(outcome, Failure):
                failed, remarks = True, [str(outcome.error)]
            else:
                remarks = list(outcome.warnings)
                if outcome.finish_reason == "length":
                    cut = True
                    remarks.append(_CUT_TEXT)
            named = [NamedFile("audio", name, "audio")]
            for remark in remarks:
                said = with_flags(remark, parsed.verb, named).removeprefix("audio: ")
                tqdm.write(f"{PROGRAM}: {name}: {said}", file=sys.stderr)
            if parsed.json:
                line = {**vars(outcome), "file": name}
                tqdm.write(json.dumps(line, allow_nan=False, default=str))
            elif isinstance(outcome, Transcript):
                text = f"{name}\t{' '.join(outcome.text.split())}"
                tqdm.write(text if many else outcome.text)
            sys.stdout.flush()
            bar.update()
    if failed:
        return ExitStatus.FAILED
    return ExitStatus.CUT if cut else ExitStatus.OK


def _errors(files: Sequence[str | bytes]) -> list[AudioError]:
    from qwen3_omni_neuron.prompt.media.audio import open_audio

    errors = list[AudioError]()
    for file in files:
        try:
            open_audio({"audio": file}, "audio")
        except AudioError as error:
            errors.append(error)
        else:
            break
    return errors
