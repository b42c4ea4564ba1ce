"""Word and character error rates of `transcribe` over clips whose words are known, and its speed.

    python -m bench.asr LibriSpeech/test-clean --model CHECKPOINT --concurrency 8 --json result.json
    python -m bench.asr manifest.jsonl --model CHECKPOINT --normalizer basic

Both texts are normalised by transformers' copy of Whisper's normalisers, since published figures
are made with them: `english` (case, punctuation, contractions, numbers, fillers; spelling too where
--spelling names the normalizer.json of a Whisper checkpoint) or, for any other language, `basic`
(case and punctuation). The rates are those of the whole set: errors over words, and over characters
with the spaces between words among them. A clip that fails counts in neither.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jiwer
from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from bench.common.arguments import positive
from bench.common.asr_manifest import Clip, read_clips
from bench.common.json_lines import ManifestError
from bench.common.metrics import percentiles
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3Omni, Qwen3OmniError
from qwen3_omni_neuron.transcription import INSTRUCTION, Failure, Transcript, transcribe


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing could be measured."""
    options = _parser().parse_args(arguments)
    try:
        clips = read_clips(options.source)[: options.limit]
        rows, summary = measure(clips, _normalizer(options.normalizer, options.spelling), options)
    except (ManifestError, Qwen3OmniError) as error:
        print(f"asr.py: {error}", file=sys.stderr)
        return 1
    publish(results_of("asr", arguments, options, rows, summary), options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser


def measure(
    clips: Sequence[Clip], normalize: Callable[[str], str], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Transcribe the clips, after the first one has warmed the model up. Times in seconds.

    Returns a row a clip, in their order, and the summary."""
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
    heard = [
        (clip.text, outcome)
        for clip, outcome in zip(clips, outcomes, strict=True)
        if isinstance(outcome, Transcript)
    ]
    rows = [_row(clip, outcome) for clip, outcome in zip(clips, outcomes, strict=True)]
    return rows, {
        "clips": len(clips),
        "failed": len(clips) - len(heard),
        "cut_by_a_limit": sum(outcome.finish_reason == "length" for _, outcome in heard),
        **error_rates([text for text, _ in heard], [o.text for _, o in heard], normalize),
        **speed([outcome for _, outcome in heard], wall_s),
    }


def _row(clip: Clip, outcome: Transcript | Failure) -> dict[str, Any]:
    """error: None where there is a transcript."""
    found = asdict(outcome)
    del found["file"]
    return {"audio": str(clip.audio), "words": clip.text, "error": None, **found}


def error_rates(
    references: Sequence[str], hypotheses: Sequence[str], normalize: Callable[[str], str]
) -> dict[str, Any]:
    """WER and CER, each over the whole set, and the words that they are made of.

    None where the references have no words. What is heard in a clip that has none is inserted.
    """
    expected, heard = [normalize(t) for t in references], [normalize(t) for t in hypotheses]
    if not any(text.strip() for text in expected):
        return {"wer": None, "cer": None, "words": 0}
    words = jiwer.process_words(expected, heard)
    return {
        "wer": words.wer,
        "cer": jiwer.process_characters(expected, heard).cer,
        "words": words.hits + words.substitutions + words.deletions,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
    }


def speed(transcripts: Sequence[Transcript], wall_s: float) -> dict[str, Any]:
    """RTF of the run (wall_s over the sound heard in it), and percentiles over the clips."""
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
        raise ManifestError(f"{spelling} is no normalizer.json: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
