"""`qwen3-omni-neuron speak` and `say`: answer a question in speech, or speak a text."""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qwen3_omni_neuron.cli.model_arguments import (
    SHIPPED,
    add_model_arguments,
    add_option,
    check_speaker,
    introduce,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.cli.parsing import PROGRAM, STDIN, NamedFile, add_examples, with_flags
from qwen3_omni_neuron.errors import ExitStatus, OptionError, OutputError
from qwen3_omni_neuron.options import LOAD_OPTIONS, REQUEST_OPTIONS, RequestOptions, SpeechArguments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.events import SpeechResult
    from qwen3_omni_neuron.runtime.stream import SpeechStream

STDOUT, OUT = "-", "speech.wav"
# Options without flags: they need token ids, lists or dicts, or matter only in programs.
_FOR_PROGRAMS = (
    *("thinker_eos_token_id", "stop", "tools", "tool_choice", "parallel_tool_calls", "grammar"),
    *("logprobs", "top_logprobs", "truncation", "cache_key", "owner"),
)
_INPUT = "Input and output"
_LIMITS = (
    *("thinker_max_new_tokens", "thinker_min_new_tokens", "ignore_eos", "talker_max_new_tokens"),
    *("runaway_speech", "first_token_timeout_s", "wait_timeout_s"),
)
_GROUPS = {
    "speaker": "options",
    **dict.fromkeys(("use_audio_in_video", "literal_text"), _INPUT),
    **dict.fromkeys(_LIMITS, "Limits"),
    **dict.fromkeys(("chunk_frames", "first_chunk"), "Engine"),
}
"""The help's group of each option; "Sampling" for the others."""


def add_speak(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments, and a flag for each option of a request."""
    parser.set_defaults(run=_speak)
    add_examples(
        parser,
        'speak "two plus three"',
        "speak --audio question.wav --out answer.mp3 --speaker Chelsie",
        'speak "two plus three" --out - | aplay -f S16_LE -r 24000',
    )
    parser.add_argument("text", nargs="?", help="question; - = stdin")
    groups = _groups_of(parser)
    for media, what in (("audio", "a sound file"), ("image", "an image"), ("video", "a video")):
        groups["options" if media == "audio" else _INPUT].add_argument(
            f"--{media}",
            action="append",
            dest="media",
            default=[],
            type=partial(lambda kind, file: (kind, file), media),
            metavar="FILE",
            help=f"add {what} to the question (- = stdin); repeatable, in order",
        )
    groups[_INPUT].add_argument("--system", metavar="TEXT", help="system message")
    _add_output(groups)
    _add_options(groups, [option.name for option in REQUEST_OPTIONS])


def add_say(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments, and a flag for each option of its requests."""
    parser.set_defaults(run=_say)
    add_examples(
        parser,
        'say "seven red goodbye"',
        'say "seven red goodbye" --speaker Chelsie --out said.mp3',
        "say - --json < text.txt",
    )
    parser.add_argument("text", help="text to speak; - = stdin")
    groups = _groups_of(parser)
    _add_output(groups)
    _add_options(groups, SpeechArguments.__annotations__)


_Groups = dict[str, argparse._ActionsContainer]


def _groups_of(parser: argparse.ArgumentParser) -> _Groups:
    """Return the groups of a parser's help; "options" has the most used ones."""
    names = (_INPUT, "Sampling", "Limits", "Engine")
    return {"options": parser} | {name: parser.add_argument_group(name) for name in names}


def _add_output(groups: _Groups) -> None:
    common = groups["options"]
    common.add_argument(
        "--out",
        metavar="FILE",
        help=f".wav, .mp3, .flac, .opus, .ogg or .pcm file; - = raw 24 kHz PCM; default: new {OUT}",
    )
    common.add_argument(
        "--play", action="store_true", help="play the complete speech; write a file only with --out"
    )
    common.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of the text"
    )
    groups[_INPUT].add_argument(
        "--quiet", action="store_true", help="print no figures or model information"
    )


def _add_options(groups: _Groups, names: Collection[str]) -> None:
    add_model_arguments(groups["options"], SHIPPED, groups["Engine"])
    add_option(groups["Engine"], LOAD_OPTIONS["context_length"])
    for option in REQUEST_OPTIONS:
        if option.name in names and option.name not in _FOR_PROGRAMS:
            add_option(groups[_GROUPS.get(option.name, "Sampling")], option)


def _speak(parsed: argparse.Namespace) -> int:
    options = _flag_options(parsed)
    RequestOptions.parse(options)
    content = list[dict[str, Any]]()
    for index, (kind, name) in enumerate(parsed.media):
        file = sys.stdin.buffer.read() if name == STDIN else name
        place = f"messages[{1 if parsed.system else 0}].content[{index}]"
        parsed.named_files += (NamedFile(place, name, f"--{kind} {name}"),)
        _check_medium(kind, file, place)
        content.append({"type": kind, kind: file})
    if parsed.text is not None:
        content.append({"type": "text", "text": _text(parsed.text)})
    if not content:
        raise OptionError("nothing to answer: give a text, or --audio, --image or --video FILE.")
    system = [{"role": "system", "content": parsed.system}] if parsed.system else []
    messages = [*system, {"role": "user", "content": content}]
    return _write_speech(parsed, lambda omni: omni.stream(messages, **options))


def _say(parsed: argparse.Namespace) -> int:
    options = _flag_options(parsed)
    RequestOptions.parse(options, SpeechArguments)
    text = _text(parsed.text)
    return _write_speech(parsed, lambda omni: omni.stream_speech(text, **options), shows_text=False)


def _text(given: str) -> str:
    """Return the argument, for "-" stdin. Raises OptionError for blanks and media files."""
    from qwen3_omni_neuron.prompt.media.fields import HEAD_BYTES, file_format

    text = sys.stdin.read().strip() if given == STDIN else given
    if not text.strip():
        raise OptionError("the text is blank: give at least one word.")
    with suppress(OSError), Path(given).open("rb") as file:
        if found := file_format(file.read(HEAD_BYTES)):
            meant = f"Did you mean speak --{found.kind} {given}?"
            raise OptionError(f"{given} is a file ({found.name}), not a text. {meant}")
    return text


def _check_medium(kind: str, file: str | bytes, where: str) -> None:
    from qwen3_omni_neuron.prompt.media.audio import open_audio
    from qwen3_omni_neuron.prompt.media.fields import read_format

    if kind == "audio":
        open_audio({"audio": file}, where)
    else:
        read_format(file, where, "image" if kind == "image" else "video")


def _flag_options(parsed: argparse.Namespace) -> dict[str, Any]:
    given = {option.name: getattr(parsed, option.name, None) for option in REQUEST_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def _write_speech(
    parsed: argparse.Namespace,
    start: "Callable[[Qwen3Omni], SpeechStream]",
    shows_text: bool = True,
) -> int:
    """Load the model, and write a stream's speech. Returns the exit status.

    start: function that starts the stream. shows_text: also print the text.
    Everything that can be checked without the model is, before it is loaded.
    """
    model, out = model_or_shipped(parsed), _out(parsed)
    if parsed.play:
        from qwen3_omni_neuron.events.playing import check_player

        check_player()
    text: TextIO | None = sys.stderr if out == STDOUT else sys.stdout
    with ExitStack() as stack:
        write_audio = _open_out(out, stack)
        check_speaker(model, parsed.speaker)
        from qwen3_omni_neuron.api import Qwen3Omni  # imports torch

        omni = stack.enter_context(Qwen3Omni.load(model, **load_arguments(parsed, slots=1)))
        if not (parsed.quiet or parsed.json):
            introduce(omni.info)
        written = text if shows_text and not parsed.json else None
        result = _write_events(start(omni), write_audio, written)
    limits = _limits(result)
    warnings = [with_flags(line, parsed.verb, parsed.named_files) for line in result.warnings]
    for line in (*warnings, *limits):
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    if parsed.json:
        print(_json_line(result, out, [*warnings, *limits]), file=text, flush=True)
    elif not parsed.quiet:
        print(_summary(result, out), file=sys.stderr)
    if parsed.play and len(result.audio):
        result.play()
    return ExitStatus.CUT if limits else ExitStatus.OK


def _open_out(out: str | None, stack: ExitStack) -> "Callable[[NDArray[np.float32]], None]":
    from qwen3_omni_neuron.events import SAMPLE_RATE
    from qwen3_omni_neuron.events.encoding import pcm16
    from qwen3_omni_neuron.events.speech_file import SpeechFile

    def write_raw(samples: "NDArray[np.float32]") -> None:
        sys.stdout.buffer.write(pcm16(samples))
        sys.stdout.buffer.flush()

    if out is None:
        return lambda samples: None
    if out == STDOUT:
        return write_raw
    try:
        return stack.enter_context(SpeechFile(Path(out), SAMPLE_RATE)).write
    except OutputError as error:
        raise OutputError(f"--out {error}") from error


def _out(parsed: argparse.Namespace) -> str | None:
    if parsed.out is not None or parsed.play:
        return parsed.out
    first = Path(OUT)
    others = (f"{first.stem}-{number}{first.suffix}" for number in count(2))
    return OUT if not first.exists() else next(n for n in others if not Path(n).exists())


def _write_events(
    stream: "SpeechStream",
    write_audio: "Callable[[NDArray[np.float32]], None]",
    text: TextIO | None,
) -> "SpeechResult":
    from qwen3_omni_neuron.events import AudioChunk, Finished, TextDelta

    with stream:
        for event in stream:
            if isinstance(event, TextDelta) and text is not None:
                print(event.text, end="", file=text, flush=True)
            elif isinstance(event, AudioChunk):
                write_audio(event.samples)
            elif isinstance(event, Finished):
                result = event.result
    if text is not None:
        print(file=text, flush=True)
    return result


def _limits(result: "SpeechResult") -> list[str]:
    t, found = result.timings, []
    if result.thinker_finish_reason == "length":
        found.append(
            f"a limit ended the text after {t.text_tokens} tokens: --thinker-max-new-tokens, or "
            "--context-length. Its end is missing."
        )
    if result.talker_finish_reason == "length":
        found.append(
            f"a limit ended the speech after {t.audio_s:.2f} s: --talker-max-new-tokens, or the "
            "length of the talker's context. The last words are not spoken."
        )
    return found


def _json_line(result: "SpeechResult", out: str | None, warnings: Sequence[str]) -> str:
    line = {
        "text": result.text,
        "file": None if out == STDOUT else out,
        "audio_s": result.timings.audio_s,
        "sample_rate": result.sample_rate,
        "seed": result.seed,
        "thinker_finish_reason": result.thinker_finish_reason,
        "talker_finish_reason": result.talker_finish_reason,
        "warnings": list(warnings),
        "timings": asdict(result.timings),
    }
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def _summary(result: "SpeechResult", out: str | None) -> str:
    t = result.timings
    lines = [f"text: {t.text_tokens} tokens, finished by {result.thinker_finish_reason}"]
    if t.ttfb_s is None or t.rtf is None:
        lines.append("no speech: the reply was empty")
        return "\n".join(lines)
    where = "" if out is None else f" -> {out}"
    lines += [
        f"speech: {t.frames} frames, {t.audio_s:.2f} s, finished by "
        f"{result.talker_finish_reason}{where}",
        f"TTFT {1000 * t.ttft_s:.0f} ms (to the first text)   "
        f"TTFB {1000 * t.ttfb_s:.0f} ms (to the first sound)   "
        f"RTF {t.rtf:.2f} (below 1: faster than real time)   seed {result.seed}",
    ]
    if t.slow_stage is not None:
        lines.append(
            f"speech is slower than real time: the {t.slow_stage} took "
            f"{t.speech_s[t.slow_stage]:.1f} s for {t.audio_s:.1f} s of audio."
        )
    return "\n".join(lines)
