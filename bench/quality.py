"""Speech heard by a recogniser that is not ours: word errors, silence, clipping, pace, voices.

    python -m bench.quality                                     # the checkpoint that ships
    python -m bench.quality sentences.txt --model CHECKPOINT --speaker Ethan
    python -m bench.quality --recogniser-url http://127.0.0.1:9000/v1 --recogniser-model whisper-1

Speaks each line of a file in each voice, and has it transcribed: by a server of OpenAI's API, or by
pocketsphinx, which needs no network: its wheel brings a model. That is a weak recogniser of 2015's
kind, so it is held to the sentences' own words, and hears the same words by espeak-ng, too:
reference_wer is what it makes of these. chance is the error rate of what was heard against the next
sentence's text: as far as the figure is below it, so much was understood.

A row is a sentence in a voice: text, heard; ttfb_s, rtf; audio_s; silence_s, the longest silence
within the speech; clipped, the share of samples at full scale; word_s, seconds a word. The
summary has them by voice. similarity: how alike two sentences of one voice are by resemblyzer's
model, the mean cosine; others: of two voices; both where that is installed.
"""

import argparse
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from bench.asr import error_rates
from bench.common.models import add_model_arguments
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.cli.model_arguments import load_arguments, model_or_shipped
from testing.command_line import Figures, InputError, Row, natural, parser_of, positive, run
from testing.headlines import PLAYS, headline

Sound = NDArray[np.float32]
Hear = Callable[[Sound], str]  # of a sentence at RATE

SENTENCES = Path(__file__).parent / "sentences.txt"
RATE, HEARD_RATE = 24000, 16000
EDGE_S = 0.2  # of silence around what pocketsphinx hears
BETWEEN_WORDS_S = 0.2  # in espeak-ng's recordings: the checkpoint that ships learned words apart
SILENT = 10 ** (-50 / 20)  # of full scale, root mean square of 10 ms
FULL_SCALE = 0.999
# A new word's probability: with pocketsphinx's own of 0.65 one word is often heard as two.
WORD_PROBABILITY = 0.05
WITHOUT_SPACES = ("zh", "yue", "ja", "th")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("quality", __doc__)
    parser.add_argument(
        "sentences", type=Path, nargs="?", default=SENTENCES, help="a line each; default: ten "
        "of the words that the checkpoint that ships knows"
    )  # fmt: skip
    add_model_arguments(parser)
    parser.add_argument("--speaker", action="append", help="repeatable; default: all")
    parser.add_argument("--limit", type=positive, help="take this many sentences, the first ones")
    parser.add_argument("--seed", type=natural, default=0, help="of every sentence")
    parser.add_argument(
        "--language", default="en", help="of the sentences; with --recogniser-url; default: en"
    )
    parser.add_argument("--recogniser-url", metavar="URL", help="a server of OpenAI's API")
    parser.add_argument("--recogniser-model", metavar="NAME", help="with --recogniser-url")
    parser.add_argument("--key", default="none", help="with --recogniser-url")
    return run("quality", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Speak, hear and compare: a row for each sentence in each voice."""
    sentences = read_sentences(options.sentences)[: options.limit]
    hear, language = recogniser(options, sentences), options.language
    reference = None if options.recogniser_url else reference_wer(sentences, hear)
    rows: list[Row] = []
    sounds: dict[str, list[Sound]] = {}
    with Qwen3Omni.load(model_or_shipped(options), **load_arguments(options, 1)) as omni:
        if not (speakers := options.speaker or omni.speakers):
            raise InputError("this checkpoint has no talker: it can write text, not speak.")
        for speaker in speakers:
            for text in sentences:
                result = omni.say(text, speaker=speaker, seed=options.seed)
                rows.append({"speaker": speaker, **row_of(text, result, hear)})
                sounds.setdefault(speaker, []).append(result.audio)
    voices = {
        speaker: of_voice([row for row in rows if row["speaker"] == speaker], language)
        for speaker in sounds
    }
    chance = error_rate(shuffled(rows), language)
    summary = {**of_voice(rows, language), "chance": chance, "reference_wer": reference}
    summary |= {"voices": voices, **alike(sounds)}
    anchor = f"words of another sentence {100 * chance:.3g} %"
    if reference is not None:
        anchor += f", espeak-ng's own recordings {100 * reference:.3g} %"
    headlines = [
        headline(rate_of(language).upper(), [summary["error_rate"]], "%", anchor),
        headline("TTFB", [row["ttfb_s"] for row in rows], "s"),
        headline("RTF", [row["rtf"] for row in rows], "", PLAYS),
    ]
    return rows, summary, headlines


def read_sentences(file: Path) -> list[str]:
    """Read the lines that are not blank. Raises InputError where there is none."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} can't be read: {error}") from error
    if not (sentences := [line for line in lines if line]):
        raise InputError(f"{file} is empty: it needs a sentence a line.")
    return sentences


def row_of(text: str, result: SpeechResult, hear: Hear) -> Row:
    """Hear one sentence."""
    sound, heard = result.audio, hear(result.audio)
    return {
        "text": text,
        "heard": heard,
        "ttfb_s": result.timings.ttfb_s,
        "rtf": result.timings.rtf,
        "audio_s": len(sound) / RATE,
        "silence_s": longest_silence_s(sound),
        "clipped": float(np.mean(np.abs(sound) >= FULL_SCALE)) if len(sound) else 0.0,
        "word_s": len(sound) / RATE / len(text.split()),
    }


def rate_of(language: str) -> str:
    """Return which rate counts: of characters where a language writes no spaces between words."""
    return "cer" if language in WITHOUT_SPACES else "wer"


def error_rate(pairs: Sequence[tuple[str, str]], language: str) -> float:
    """Return the errors over all words, or characters, of pairs of a text and what was heard.

    Normalised as Whisper's figures are. Raises InputError for texts without words.
    """
    texts, heard = zip(*pairs, strict=True)
    normalize = EnglishTextNormalizer({}) if language == "en" else BasicTextNormalizer()
    rate = error_rates(texts, heard, normalize)[rate_of(language)]
    if rate is None:
        raise InputError(f"{texts[0]!r} has no words to be heard.")
    return float(rate)


def shuffled(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return each text with what was heard of the next one: what a deaf recogniser would get."""
    following = [*rows[1:], rows[0]]
    return [(row["text"], other["heard"]) for row, other in zip(rows, following, strict=True)]


def longest_silence_s(sound: Sound) -> float:
    """Return the longest silence between two parts of speech, in seconds; 0 without speech."""
    step = RATE // 100
    frames = sound[: len(sound) // step * step].reshape(-1, step)
    loud = np.flatnonzero(np.sqrt(np.mean(frames**2, axis=1)) > SILENT)
    return float(max(np.diff(loud) - 1, default=0)) / 100


def of_voice(rows: Sequence[Row], language: str) -> dict[str, Any]:
    """Return the error rate of all rows, their longest silence, and means of the rest."""
    return {
        "error_rate": error_rate([(row["text"], row["heard"]) for row in rows], language),
        "silence_s": max(row["silence_s"] for row in rows),
        "clipped": mean(row["clipped"] for row in rows),
        "word_s": mean(row["word_s"] for row in rows),
    }


def recogniser(options: argparse.Namespace, sentences: Sequence[str]) -> Hear:
    """Return the recogniser that the command line names. Raises InputError without one."""
    if options.recogniser_url:
        if not options.recogniser_model:
            raise InputError("--recogniser-url needs --recogniser-model, the name of its model.")
        return over_http(options)
    if options.language != "en":
        raise InputError("pocketsphinx hears English alone. Name a server by --recogniser-url.")
    if importlib.util.find_spec("pocketsphinx") is None:
        raise InputError(
            "pocketsphinx is not installed: it has wheels for Python 3.10 to 3.13 on x86-64 "
            "(pip install pocketsphinx). Or name a server by --recogniser-url."
        )
    if importlib.util.find_spec("espeakng_loader") is None:
        raise InputError("espeak-ng is not installed: pip install espeakng-loader.")
    return pocketsphinx(sentences)


def over_http(options: argparse.Namespace) -> Hear:
    """Return a recogniser that asks a server of OpenAI's API."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=options.recogniser_url, api_key=options.key)
    asked = {"model": options.recogniser_model, "language": options.language}

    def hear(sound: Sound) -> str:
        file = io.BytesIO()
        soundfile.write(file, sound, RATE, format="WAV", subtype="PCM_16")
        try:
            sent = ("speech.wav", file.getvalue())
            return client.audio.transcriptions.create(file=sent, **asked).text
        except OpenAIError as error:
            raise InputError(f"{options.recogniser_url}: {error}") from error

    return hear


def pocketsphinx(sentences: Sequence[str]) -> Hear:
    """Return pocketsphinx, held to the words of sentences, in any order.

    Raises InputError, with the words, where its dictionary lacks some.
    """
    from pocketsphinx import Decoder

    decoder = Decoder(samprate=HEARD_RATE, lm=None, loglevel="FATAL", wip=WORD_PROBABILITY)
    words = sorted({word for text in sentences for word in spoken_words(text)})
    if unknown := [word for word in words if decoder.lookup_word(word) is None]:
        raise InputError(
            f"pocketsphinx's dictionary has no {', '.join(unknown)}. Take other words, or name a "
            "server by --recogniser-url."
        )
    rule = f"public <sentence> = ( {' | '.join(words)} )+;"
    decoder.add_jsgf_string("sentence", f"#JSGF V1.0;\ngrammar sentences;\n{rule}\n")
    decoder.activate_search("sentence")
    edge = np.zeros(round(EDGE_S * HEARD_RATE), np.int16)

    def hear(sound: Sound) -> str:
        resampled = np.clip(soxr.resample(sound, RATE, HEARD_RATE), -1, 1)
        samples = np.concatenate((edge, (32767 * resampled).astype(np.int16), edge))
        decoder.start_utt()
        decoder.process_raw(samples.tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr if found else ""

    return hear


def spoken_words(text: str) -> list[str]:
    """Return the words of a text as a dictionary of pronunciations has them."""
    return re.findall(r"[a-z']+", text.lower())


def reference_wer(sentences: Sequence[str], hear: Hear) -> float:
    """Return the word error rate of the same words by espeak-ng, in three voices."""
    from train.espeak import VOICES, Voice, speak

    gap = np.zeros(round(BETWEEN_WORDS_S * RATE), np.float32)

    def recording(text: str, voice: Voice) -> Sound:
        parts = [(speak(word, voice, RATE), gap) for word in spoken_words(text)]
        return np.concatenate([sound for part in parts for sound in part])

    recorded = product(sentences, VOICES.values())
    return error_rate([(text, hear(recording(text, voice))) for text, voice in recorded], "en")


def alike(sounds: dict[str, list[Sound]]) -> dict[str, Any]:
    """Return how alike sentences of one voice are, and those of different voices.

    Without resemblyzer: the reason.
    """
    if importlib.util.find_spec("resemblyzer") is None:
        return {"similarity": "not measured: pip install resemblyzer webrtcvad-wheels"}
    from resemblyzer import VoiceEncoder, preprocess_wav

    encoder = VoiceEncoder("cpu", verbose=False)
    found = [
        (speaker, encoder.embed_utterance(preprocess_wav(sound, source_sr=RATE)))
        for speaker, some in sounds.items()
        for sound in some
    ]
    pairs = [(one == other, float(a @ b)) for (one, a), (other, b) in combinations(found, 2)]
    same, others = (
        [cosine for is_one, cosine in pairs if is_one == kind] for kind in (True, False)
    )
    return {
        "similarity": mean(same) if same else None,
        "others": mean(others) if others else None,
    }


if __name__ == "__main__":
    sys.exit(main())
