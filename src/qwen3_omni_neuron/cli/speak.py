"""`qwen3-omni-neuron speak` and `say`: answer a question in speech, or speak a text itself."""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    add_option,
    introduce,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.errors import ExitStatus, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.events import SpeechResult
    from qwen3_omni_neuron.options import Option
    from qwen3_omni_neuron.runtime.stream import SpeechStream

STDIN = STDOUT = "-"
# Options that need the tokenizer, a list or dicts, serve several callers, or change no output here.
_FOR_PROGRAMS = (
    *("thinker_eos_token_id", "stop", "tools", "tool_choice", "parallel_tool_calls", "grammar"),
    *("logprobs", "top_logprobs", "truncation", "cache_key", "owner"),
)


def add_speak(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb and a flag for each option of a request."""
    from qwen3_omni_neuron.options import REQUEST_OPTIONS

    parser.set_defaults(run=_speak)
    parser.add_argument("text", nargs="?", help="the question, in words")
    for media, what in (("audio", "a spoken part"), ("image", "an image"), ("video", "a video")):
        parser.add_argument(
            f"--{media}",
            action="append",
            dest="media",
            default=[],
            type=partial(_media_item, media),
            metavar="FILE",
            help=f"{what} of the question; repeatable, in order",
        )
    parser.add_argument("--system", help="a system message before the question")
    _add_out(parser)
    add_model_arguments(parser, "the small one that ships with the package")
    _add_options(parser, REQUEST_OPTIONS)


def add_say(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb and a flag for each option that its requests have."""
    from qwen3_omni_neuron.options import REQUEST_OPTIONS, SpeechArguments

    parser.set_defaults(run=_say)
    parser.add_argument("text", help="the words to speak; - reads them from stdin")
    _add_out(parser)
    add_model_arguments(parser, "the small one that ships with the package")
    names = SpeechArguments.__annotations__
    _add_options(parser, [option for option in REQUEST_OPTIONS if option.name in names])


def _add_out(parser: argparse.ArgumentParser) -> None:
    """Add --out."""
    parser.add_argument(
        "--out",
        default="speech.wav",
        metavar="FILE",
        help="where the speech goes, in the format of the name's ending: .wav, .mp3, .flac, .opus, "
        ".ogg, .pcm; default: %(default)s; - writes it to stdout as it is made, raw 16-bit PCM of "
        "24 kHz",
    )


def _add_options(parser: argparse.ArgumentParser, options: "Sequence[Option]") -> None:
    """Add a flag for each option of a request."""
    for option in options:
        if option.name not in _FOR_PROGRAMS:
            add_option(parser, option)


def _speak(parsed: argparse.Namespace) -> int:
    """Answer one question. Returns the exit status."""
    if not parsed.text and not parsed.media:
        raise OptionError("nothing to answer: give a text, or --audio, --image or --video FILE.")
    messages = _messages(parsed)
    return _write_speech(parsed, lambda omni, options: omni.stream(messages, **options))


def _say(parsed: argparse.Namespace) -> int:
    """Speak one text. Returns the exit status."""
    text = sys.stdin.read() if parsed.text == STDIN else parsed.text
    return _write_speech(
        parsed, lambda omni, options: omni.stream_speech(text, **options), shows_text=False
    )


def _write_speech(
    parsed: argparse.Namespace,
    start: "Callable[[Qwen3Omni, dict[str, Any]], SpeechStream]",
    shows_text: bool = True,
) -> int:
    """Load the model, and write a stream's speech. Returns the exit status.

    start: function that starts the stream with the given options. shows_text: also print the text.
    """
    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.events import SAMPLE_RATE
    from qwen3_omni_neuron.options import REQUEST_OPTIONS
    from qwen3_omni_neuron.sound.encoding import pcm16
    from qwen3_omni_neuron.sound.speech_file import SpeechFile

    model = model_or_shipped(parsed)
    given = {
        option.name: value
        for option in REQUEST_OPTIONS
        if (value := getattr(parsed, option.name, None)) is not None
    }
    load = load_arguments(parsed, slots=1)
    with ExitStack() as stack:
        if parsed.out == STDOUT:
            raw, text = sys.stdout.buffer, sys.stderr

            def write_audio(samples: "NDArray[np.float32]") -> None:
                raw.write(pcm16(samples))
                raw.flush()
        else:
            write_audio = stack.enter_context(SpeechFile(Path(parsed.out), SAMPLE_RATE)).write
            text = sys.stdout
        omni = stack.enter_context(Qwen3Omni.load(model, **load))
        introduce(omni.info)
        stream = start(omni, given)
        result = _write_events(stream, write_audio, text if shows_text else None)
    limits = _limits(result)
    for line in (*result.warnings, *limits):
        print(f"qwen3-omni-neuron: {line}", file=sys.stderr)
    print(_summary(result, parsed.out), file=sys.stderr)
    return ExitStatus.CUT if limits else ExitStatus.OK


def _write_events(
    stream: "SpeechStream",
    write_audio: "Callable[[NDArray[np.float32]], None]",
    text: TextIO | None,
) -> "SpeechResult":
    """Write a stream's audio, and write its text to `text` unless that is None."""
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


def _messages(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = list(parsed.media)
    if parsed.text:
        content.append({"type": "text", "text": parsed.text})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if parsed.system:
        messages.insert(0, {"role": "system", "content": parsed.system})
    return messages


def _limits(result: "SpeechResult") -> list[str]:
    """Return a sentence for each limit that ended the reply."""
    t, found = result.timings, []
    if result.thinker_finish_reason == "length":
        found.append(
            f"a limit ended the text after {t.text_tokens} tokens: --thinker-max-new-tokens, or "
            "the length of the model's context. Its end is missing."
        )
    if result.talker_finish_reason == "length":
        found.append(
            f"a limit ended the speech, which has {t.audio_s:.2f} s: --talker-max-new-tokens, or "
            "the length of the talker's context. Words of the text are not spoken."
        )
    return found


def _summary(result: "SpeechResult", out: str) -> str:
    t = result.timings
    lines = [f"text: {t.text_tokens} tokens, finished by {result.thinker_finish_reason}"]
    if t.ttfb_s is None or t.rtf is None:
        lines.append("speech: none, the reply was empty")
        return "\n".join(lines)
    lines += [
        f"speech: {t.frames} frames, {t.audio_s:.2f} s, finished by "
        f"{result.talker_finish_reason} -> {out}",
        f"TTFT {1000 * t.ttft_s:.0f} ms   TTFB {1000 * t.ttfb_s:.0f} ms   RTF {t.rtf:.2f}   "
        f"seed {result.seed}",
    ]
    if t.slow_speech is not None:
        lines.append(t.slow_speech)
    return "\n".join(lines)


def _media_item(kind: str, path: str) -> dict[str, Any]:
    return {"type": kind, kind: path}
