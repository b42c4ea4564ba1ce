"""Speech heard by a recogniser that is not ours: word errors, silence, clipping, pace, voices.

    python -m bench.quality                                     # the checkpoint that ships
    python -m bench.quality sentences.txt --model CHECKPOINT --speaker Ethan
    python -m bench.quality --recogniser-url http://127.0.0.1:9000/v1 --recogniser-model whisper-1

Speaks each line of a file in each voice, and has it transcribed: by a server of OpenAI's API, or by
pocketsphinx, which needs no network: its wheel brings a model. That is a weak recogniser of 2015's
kind, so it is held to the sentences' own words, and hears the same words by espeak-ng, too:
reference_wer is what it makes of these, and says how far its figures can be trusted.

A row is a sentence in a voice: text, heard, wer; ttfb_s, rtf; audio_s; silence_s, the longest
silence within the speech; clipped, the share of samples at full scale; word_s, seconds a word. The
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
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

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
NORMALIZE = EnglishTextNormalizer({})


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
    parser.add_argument("--recogniser-url", metavar="URL", help="a server of OpenAI's API")
    parser.add_argument("--recogniser-model", metavar="NAME", help="with --recogniser-url")
    parser.add_argument("--key", default="none", help="with --recogniser-url")
    return run("quality", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Speak, hear and compare: a row for each sentence in each voice."""
    sentences = read_sentences(options.sentences)[: options.limit]
    hear = recogniser(options, sentences)
    rows: list[Row] = []
    sounds: dict[str, list[Sound]] = {}
    with Qwen3Omni.load(model_or_shipped(options), **load_arguments(options, 1)) as omni:
        for speaker in options.speaker or omni.speakers:
            for text in sentences:
                result = omni.say(text, speaker=speaker, seed=options.seed)
                rows.append({"speaker": speaker, **row_of(text, result, hear)})
                sounds.setdefault(speaker, []).append(result.audio)
    reference = None if options.recogniser_url else reference_wer(sentences, hear)
    voices = {
        speaker: of_voice([row for row in rows if row["speaker"] == speaker]) for speaker in sounds
    }
    summary = {**of_voice(rows), "reference_wer": reference, "voices": voices, **alike(sounds)}
    anchor = "" if reference is None else f"espeak-ng's own recordings {100 * reference:.3g} %"
    headlines = [
        headline("WER", [summary["wer"]], "%", anchor),
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
        "wer": word_error_rate([(text, heard)]),
        "ttfb_s": result.timings.ttfb_s,
        "rtf": result.timings.rtf,
        "audio_s": len(sound) / RATE,
        "silence_s": longest_silence_s(sound),
        "clipped": float(np.mean(np.abs(sound) >= FULL_SCALE)) if len(sound) else 0.0,
        "word_s": len(sound) / RATE / len(text.split()),
    }


def word_error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the errors over all words of pairs of a text and what was heard.

    Normalised as Whisper's figures are. Raises InputError for texts without words.
    """
    texts, heard = zip(*pairs, strict=True)
    rate = error_rates(texts, heard, NORMALIZE)["wer"]
    if rate is None:
        raise InputError(f"{texts[0]!r} has no words to be heard.")
    return float(rate)


def longest_silence_s(sound: Sound) -> float:
    """Return the longest silence between two parts of speech, in seconds; 0 without speech."""
    step = RATE // 100
    frames = sound[: len(sound) // step * step].reshape(-1, step)
    loud = np.flatnonzero(np.sqrt(np.mean(frames**2, axis=1)) > SILENT)
    return float(max(np.diff(loud) - 1, default=0)) / 100


def of_voice(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the word error rate of all rows, their longest silence, and means of the rest."""
    return {
        "wer": word_error_rate([(row["text"], row["heard"]) for row in rows]),
        "silence_s": max(row["silence_s"] for row in rows),
        "clipped": mean(row["clipped"] for row in rows),
        "word_s": mean(row["word_s"] for row in rows),
    }


def recogniser(options: argparse.Namespace, sentences: Sequence[str]) -> Hear:
    """Return the recogniser that the command line names. Raises InputError without one."""
    if options.recogniser_url:
        if not options.recogniser_model:
            raise InputError("--recogniser-url needs --recogniser-model, the name of its model.")
        return over_http(options.recogniser_url, options.recogniser_model, options.key)
    if importlib.util.find_spec("pocketsphinx") is None:
        raise InputError(
            "pocketsphinx is not installed: it has wheels for Python 3.10 to 3.13 on x86-64 "
            "(pip install pocketsphinx). Or name a server by --recogniser-url."
        )
    return pocketsphinx(sentences)


def over_http(url: str, model: str, key: str) -> Hear:
    """Return a recogniser that asks a server of OpenAI's API."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=url, api_key=key)

    def hear(sound: Sound) -> str:
        file = io.BytesIO()
        soundfile.write(file, sound, RATE, format="WAV", subtype="PCM_16")
        try:
            asked = client.audio.transcriptions.create(
                model=model, file=("speech.wav", file.getvalue()), language="en"
            )
        except OpenAIError as error:
            raise InputError(f"{url}: {error}") from error
        return asked.text

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
    return word_error_rate([(text, hear(recording(text, voice))) for text, voice in recorded])


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
