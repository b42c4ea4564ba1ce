"""`qwen3-omni-neuron speak`: a question in, text and speech out."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    load_arguments,
    model_or_ours,
    sizes,
)
from qwen3_omni_neuron.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from qwen3_omni_neuron.events import SpeechResult
    from qwen3_omni_neuron.runtime.stream import SpeechStream

STDOUT = "-"
_DEFAULT_HELP = {"seed": "default: a new one each time"} | dict.fromkeys(
    ("thinker_do_sample", "thinker_temperature", "thinker_top_k", "thinker_top_p"),
    "default: the checkpoint's",
)


def add_speak(parser: argparse.ArgumentParser) -> None:
    """Say what the verb takes: its own arguments, and every option of a request."""
    from qwen3_omni_neuron.options import RequestOptions

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
    parser.add_argument(
        "--out",
        default="speech.wav",
        metavar="WAV",
        help="where the speech goes; - plays it to stdout as it comes, raw 16-bit PCM of 24 kHz",
    )
    add_model_arguments(parser, "the little one that ships with the package")
    parser.add_argument(
        "--chunk-frames",
        type=sizes,
        metavar="N,N,...",
        help="frames of the first chunks, the last for all that follow; default: adaptive",
    )
    for option in fields(RequestOptions):
        if option.name in ("thinker_eos_token_id", "chunk_frames"):
            continue  # the first is for other programs, the second stands above
        kind = _value_type(option.type)
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=_boolean if kind is bool else kind,
            metavar=kind.__name__.upper(),
            help=_DEFAULT_HELP.get(option.name, f"default: {option.default}"),
        )


def _speak(parsed: argparse.Namespace) -> int:
    """Answer one question. Returns the exit status."""
    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.cli.wav import WavFile, pcm16
    from qwen3_omni_neuron.events import SAMPLE_RATE
    from qwen3_omni_neuron.options import RequestOptions

    if not parsed.text and not parsed.media:
        raise OptionError("nothing to answer: give a text, or --audio, --image or --video FILE.")
    model = model_or_ours(parsed)
    given = {
        option.name: value
        for option in fields(RequestOptions)
        if (value := getattr(parsed, option.name, None)) is not None
    }
    load = load_arguments(parsed, slots=1)
    with ExitStack() as stack:
        if parsed.out == STDOUT:
            sound, text = sys.stdout.buffer, sys.stderr

            def hear(samples: "NDArray[np.float32]") -> None:
                sound.write(pcm16(samples))
                sound.flush()
        else:
            hear = stack.enter_context(WavFile(Path(parsed.out), SAMPLE_RATE)).write
            text = sys.stdout
        omni = stack.enter_context(Qwen3Omni.load(model, **load))
        result = _follow(omni.stream(_messages(parsed), **given), hear, text)
    print(_summary(result, parsed.out), file=sys.stderr)
    return 0


def _follow(
    stream: "SpeechStream", hear: "Callable[[NDArray[np.float32]], None]", text: TextIO
) -> "SpeechResult":
    """Print the text and hand on the sound as they come."""
    from qwen3_omni_neuron.events import AudioChunk, Finished, TextDelta

    with stream:
        for event in stream:
            if isinstance(event, TextDelta):
                print(event.text, end="", file=text, flush=True)
            elif isinstance(event, AudioChunk):
                hear(event.samples)
            elif isinstance(event, Finished):
                result = event.result
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
    return "\n".join(lines)


def _media_item(kind: str, path: str) -> dict[str, Any]:
    return {"type": kind, kind: path}


def _value_type(annotation: Any) -> type:
    """int of `int | None`, and so on."""
    return get_args(annotation)[0] if get_args(annotation) else annotation


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
