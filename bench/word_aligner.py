"""Errors of word times that are read from the thinker's attention to the sound it transcribes.

    python -m bench.word_aligner --clips 400 --json word_aligner.json

Clips of two to four words in the voices of the checkpoint that ships, at speeds, pitches and a
noise that training left out; those transcribed wrong are left out. "connected": in one breath, with
espeak-ng's times. "separate": each word by itself, and up to EDGE_S of silence before the next.

Attention: of the row that chooses a word to the audio rows, normalised over the words, averaged
over one or two heads and cut by dynamic time warping, as Whisper does. Half of the clips choose the
heads and a constant delay, the other half is measured. Bytes: time in proportion to the text's
bytes. Both take the first and the last sound as known. inner: starts of all but the first word.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bench.word_times import spread
from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.model.audio_encoder import window_batches
from qwen3_omni_neuron.model.decoder import PROMPT, Attention
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache
from qwen3_omni_neuron.model.rotary import apply_rotary
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import rope_positions
from testing.command_line import Figures, Row, parser_of, positive, run
from testing.headlines import headline
from testing.models import load_models
from train.espeak import VOICES, speak, speak_words
from train.speech import MEASURING, RATE, pink_noise
from train.vocabulary import MOST_WORDS, SPOKEN

ROW_S = 0.08
EDGE_S = 0.25  # the checkpoint has not learned longer silences
FLOOR = 0.06  # of the loudest 10 ms: a quieter 10 ms are silence

Times = NDArray[np.float64]  # [words, 2], start and end of each in seconds


@dataclass(frozen=True)
class Clip:
    """Words in float32 samples at 16 kHz. attention: float32 [heads, words, audio rows]."""

    words: list[str]
    true_s: Times
    samples: NDArray[np.float32]
    attention: NDArray[np.float32]

    @property
    def bounds_s(self) -> tuple[float, float]:
        power = np.square(self.samples[: len(self.samples) // 160 * 160]).reshape(-1, 160).sum(1)
        loud = np.flatnonzero(power > FLOOR**2 * power.max())
        return 0.01 * loud[0], 0.01 * (loud[-1] + 1)

    def by_attention(self, heads: Sequence[int], delay_s: float) -> Times:
        from librosa.sequence import dtw  # takes seconds

        begin_s, end_s = self.bounds_s
        first = int(begin_s / ROW_S)
        weights = self.attention[list(heads), :, first : math.ceil(end_s / ROW_S)]
        spread = weights.std(1, keepdims=True) + 1e-9
        _, path = dtw(C=-((weights - weights.mean(1, keepdims=True)) / spread).mean(0))
        rows = [first + path[path[:, 0] == word, 1].min() for word in range(len(self.words))]
        return self._times(np.array(rows) * ROW_S - delay_s)

    def by_bytes(self) -> Times:
        return self._times(spread(self.words, [self.bounds_s]))

    def _times(self, starts_s: ArrayLike) -> Times:
        begin_s, end_s = self.bounds_s
        edges_s = [begin_s, *np.clip(starts_s, begin_s, end_s)[1:], end_s]
        return np.stack((edges_s[:-1], edges_s[1:]), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("word_aligner", __doc__)
    parser.add_argument("--clips", type=positive, default=400, help="of each kind")
    return run("word_aligner", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure both maps over both kinds of clips: a row for each, and for starts and ends."""
    dice, listener = random.Random(0), Listener()
    kinds = dict[str, list[Clip]]()
    for kind in ("connected", "separate"):
        heard = [listener.hear(*spoken(kind, dice)) for _ in range(options.clips)]
        kinds[kind] = [clip for clip in heard if clip is not None]
    heads, delay_s = chosen([clip for clips in kinds.values() for clip in clips[::2]])
    maps = {"attention": lambda clip: clip.by_attention(heads, delay_s), "bytes": Clip.by_bytes}
    rows = list[Row]()
    for (kind, clips), (name, times) in product(kinds.items(), maps.items()):
        errors = [np.abs(times(clip) - clip.true_s) for clip in clips[1::2]]
        starts, ends = np.concatenate(errors).T
        inner = np.concatenate([error[1:, 0] for error in errors])
        for edge, some in (("start", starts), ("end", ends), ("inner", inner)):
            p50_s, p90_s = np.percentile(some, (50, 90)).tolist()
            row = {"kind": kind, "map": name, "of": edge, "count": len(some)}
            rows.append(row | {"p50_s": p50_s, "p90_s": p90_s})
    left_out = 2 * options.clips - sum(map(len, kinds.values()))
    summary = {"heads": heads, "delay_s": delay_s, "left_out": left_out}
    medians = [row["p50_s"] for row in rows if row["map"] == "attention"]
    return rows, summary, [headline("medians of errors, attention", medians, "s", "goal 0.12 s")]


def chosen(clips: Sequence[Clip]) -> tuple[tuple[int, ...], float]:
    """Return the one or two heads whose mean has the least median error, and their delay."""
    heads = range(len(clips[0].attention))
    found = list[tuple[float, float, tuple[int, ...]]]()
    for some in (*combinations(heads, 1), *combinations(heads, 2)):
        late = np.concatenate([(c.by_attention(some, 0) - c.true_s)[1:, 0] for c in clips])
        delay_s = float(np.median(late))
        found.append((float(np.median(np.abs(late - delay_s))), delay_s, some))
    _, delay_s, best = min(found)
    return best, delay_s


class Listener:
    """The checkpoint's audio encoder and thinker, in float32, and their attention."""

    def __init__(self) -> None:
        self._config = read_config(SPEAKING_CHECKPOINT)
        files = Checkpoint(SPEAKING_CHECKPOINT)
        models: Any = load_models(files, self._config, torch.float32, ("thinker",))
        self._thinker, self._encoder = models.thinker, models.audio_encoder
        self._builder = PromptBuilder(SPEAKING_CHECKPOINT, self._config)
        self._weights = list[torch.Tensor]()
        for layer in self._thinker.decoder.layers:
            layer.attention.register_forward_pre_hook(self._keep)

    @torch.inference_mode()
    def hear(self, words: list[str], true_s: Times, samples: NDArray[np.float32]) -> Clip | None:
        """Transcribe a clip; return None where the words are wrong."""
        audio = {"type": "audio", "audio": (samples, RATE)}
        prompt = self._builder.prompt([{"role": "user", "content": [audio]}])
        reply = self._builder.encode_words(" ".join(words))  # a token each
        token_ids = torch.cat((prompt.token_ids, torch.tensor(reply)))
        is_audio = token_ids == self._config.thinker.audio_token_id
        positions = rope_positions(len(token_ids))  # a clip's are those of text
        (batch,) = window_batches(prompt.audio_mel, self._config.thinker.audio, 1, whole=False)
        x = self._thinker.embedding(token_ids)
        x[is_audio] = self._encoder(*batch)[batch.valid]
        rotation = self._thinker.rotary.at_axes(positions)
        cache = KvCache.zeros(self._config.thinker.text, 1, len(x), torch.float32)
        self._weights.clear()
        x, _ = self._thinker.decoder(x, rotation, PromptCache(cache), PROMPT)
        asks = slice(len(prompt) - 1, -1)
        logits = self._thinker.head(self._thinker.decoder.norm(x[asks]))
        weights = torch.cat(self._weights)[:, asks, is_audio]
        right = logits.argmax(1).tolist() == reply
        return Clip(words, true_s, samples, weights.numpy()) if right else None

    def _keep(self, module: Attention, inputs: Any) -> None:
        """Compute the attention again, [heads, rows, rows]: the module does not return it."""
        x, rotation, *_ = inputs
        qkv = module.qkv(x).unflatten(1, (-1, module.head_dim))[:, : -module.kv_heads]
        qk = apply_rotary(module.qk_norm(qkv), rotation).transpose(0, 1)
        keys = qk[module.heads :].repeat_interleave(module.heads // module.kv_heads, 0)
        scores = module.scale * qk[: module.heads] @ keys.transpose(1, 2)
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        self._weights.append(scores.masked_fill(later, float("-inf")).softmax(-1))


def spoken(kind: str, dice: random.Random) -> tuple[list[str], Times, NDArray[np.float32]]:
    """Return random words, their true times, and their sound with noise."""
    words = [dice.choice(SPOKEN) for _ in range(dice.randint(2, MOST_WORDS))]
    voice = VOICES[dice.choice(sorted(VOICES))]
    pitch = min(99, max(0, voice.pitch + dice.choice(MEASURING.pitches)))
    voice = replace(voice, words_per_minute=dice.choice(MEASURING.speeds), pitch=pitch)
    if kind == "connected":
        sound, onsets_s = speak_words(" ".join(words), voice, RATE)
        edges_s = np.array([*onsets_s.values(), len(sound) / RATE])
        times_s = np.stack((edges_s[:-1], edges_s[1:]), 1)
    else:
        parts = list[NDArray[np.float32]]()
        for word in words:
            parts += (speak(word, voice, RATE), _silence(0, dice))
        ends_s = np.cumsum([len(part) for part in parts]) / RATE
        times_s = np.stack(([0, *ends_s[1:-1:2]], ends_s[::2]), 1)
        sound = np.concatenate(parts[:-1])
    edge = _silence(0.02, dice)
    clip = np.concatenate((edge, sound, _silence(0.02, dice)))
    level = 10 ** (-dice.uniform(*MEASURING.below_db) / 20) * np.sqrt(np.mean(sound**2))
    clip += level * pink_noise(len(clip), dice)
    return words, times_s + len(edge) / RATE, (clip / np.abs(clip).max()).astype(np.float32)


def _silence(least_s: float, dice: random.Random) -> NDArray[np.float32]:
    return np.zeros(int(dice.uniform(least_s, EDGE_S) * RATE), np.float32)


if __name__ == "__main__":
    sys.exit(main())
