"""Word and character error rates of `transcribe` over clips whose words are known, and its speed.

    python -m bench.asr LibriSpeech/test-clean --model CHECKPOINT --concurrency 8 --json result.json
    python -m bench.asr manifest.jsonl --model CHECKPOINT --normalizer basic

Both texts are normalised by transformers' copy of Whisper's normalisers, since published figures
are made with them: `english` (case, punctuation, contractions, numbers, fillers; spelling too where
--spelling names the normalizer.json of a Whisper checkpoint) or, for any other language, `basic`
(case and punctuation). The rates are those of the whole set: errors over words, and errors over
characters, spaces between words included. A clip that fails counts in neither.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jiwer
from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from bench.common.manifests import Clip, read_clips
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.options import INSTRUCTION
from qwen3_omni_neuron.transcription import Failure, Transcript, transcribe
from testing.command_line import Figures, InputError, Row, parser_of, positive, run
from testing.headlines import headline
from testing.metrics import percentiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("asr", __doc__)
    parser.add_argument("source", type=Path, help="a manifest of JSON lines, or LibriSpeech folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--placement", default="shared")
    parser.add_argument("--concurrency", type=int, default=1, help="files at once")
    parser.add_argument("--instruction", default=INSTRUCTION)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--normalizer", choices=("english", "basic"), default="english")
    parser.add_argument("--spelling", type=Path, help="a Whisper checkpoint's normalizer.json")
    parser.add_argument("--limit", type=positive, help="take this many clips, the first ones")
    return run("asr", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Transcribe the clips, after a warm-up with the first one: a row for each clip, in order."""
    clips = read_clips(options.source)[: options.limit]
    normalize = _normalizer(options.normalizer, options.spelling)
    files = [clip.audio for clip in clips]
    limits = {"concurrency": options.concurrency, "instruction": options.instruction}
    with Qwen3Omni.load(
        options.model,
        dtype=options.dtype,
        placement=options.placement,
        max_concurrency=options.concurrency,
    ) as omni:
        list(transcribe(omni, files[:1], max_new_tokens=2, **limits))
        start_s = time.perf_counter()
        outcomes = list(transcribe(omni, files, max_new_tokens=options.max_new_tokens, **limits))
        wall_s = time.perf_counter() - start_s
    both = list(zip(clips, outcomes, strict=True))
    done = [(clip.text, outcome) for clip, outcome in both if isinstance(outcome, Transcript)]
    transcripts = [outcome for _, outcome in done]
    summary = {
        "clips": len(clips),
        "failed": len(clips) - len(done),
        "cut_by_a_limit": sum(outcome.finish_reason == "length" for outcome in transcripts),
        **error_rates([text for text, _ in done], [o.text for o in transcripts], normalize),
        **speed(transcripts, wall_s),
    }
    found = [
        headline("WER", [summary["wer"]], "%", "port #167: 1.56 % of LibriSpeech test-clean"),
        headline("TTFT", [t.ttft_s for t in transcripts], "s"),
        headline("RTF", [t.rtf for t in transcripts], "", "port #167: 0.12"),
    ]
    return [_row(clip, outcome) for clip, outcome in both], summary, found


def _row(clip: Clip, outcome: Transcript | Failure) -> Row:
    """Return a clip's row; its error is None where there is a transcript."""
    found = {name: value for name, value in vars(outcome).items() if name != "file"}
    if isinstance(outcome, Failure):
        found["error"] = str(outcome.error)
    return {"audio": str(clip.audio), "words": clip.text, "error": None, **found}


def error_rates(
    references: Sequence[str], hypotheses: Sequence[str], normalize: Callable[[str], str]
) -> dict[str, Any]:
    """Return WER and CER, each over the whole set, and the counts from which they are computed.

    Both are None where the references have no words. Words transcribed from a clip without words
    are insertions.
    """
    expected, found = [normalize(t) for t in references], [normalize(t) for t in hypotheses]
    if not any(text.strip() for text in expected):
        return {"wer": None, "cer": None, "words": 0}
    words = jiwer.process_words(expected, found)
    return {
        "wer": words.wer,
        "cer": jiwer.process_characters(expected, found).cer,
        "words": words.hits + words.substitutions + words.deletions,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
    }


def speed(transcripts: Sequence[Transcript], wall_s: float) -> dict[str, Any]:
    """Return the run's RTF (wall_s over the transcribed audio), and percentiles of clips."""
    audio_s = sum(t.audio_s for t in transcripts)
    return {
        "audio_s": audio_s,
        "wall_s": wall_s,
        "rtf": wall_s / audio_s if audio_s else None,
        "ttft_s": percentiles([t.ttft_s for t in transcripts]),
        "total_s": percentiles([t.total_s for t in transcripts]),
        "clip_rtf": percentiles([t.rtf for t in transcripts]),
    }


def _normalizer(name: str, spelling: Path | None) -> Callable[[str], str]:
    if name == "basic":
        return BasicTextNormalizer()
    if spelling is None:
        return EnglishTextNormalizer({})
    try:
        return EnglishTextNormalizer(json.loads(spelling.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{spelling} is no normalizer.json: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
