"""Cost of a grammar: eight replies held to a JSON schema, beside eight free ones.

    python -m bench.grammar --size small

An iteration is what the thinker's stage does for eight requests: the engine's step, the sampling of
eight tokens from a vocabulary of the released size (151,936, synthetic: the model's own logits are
not read), and with a grammar the masks, made while the engine computes, and the grammars' progress.
Both kinds of iteration run in turn. The share is what a grammar adds to an iteration, over the
engine's step alone. Compiling is timed beside it, with the vocabulary's tokenizer, made once.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from bench.common.command_line import Figures, parser_of, positive, run
from bench.common.measure import timed
from bench.common.models import (
    add_model_arguments,
    chosen_checkpoint,
    loaded_engines,
    written_messages,
)
from qwen3_omni_neuron.engines.sampling import RequestRandom, Sampler, SamplingParams
from qwen3_omni_neuron.loading import host_sampler
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.runtime.grammar import Grammar, Grammars, GrammarState, MaskThread

SLOTS, VOCABULARY, PROMPT_TOKENS = 8, 151_936, 64
END = "<|im_end|>"
MARKERS = (END, "<tool_call>", "</tool_call>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a place", "a person", "a thing"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 8},
        "where": {
            "type": "object",
            "properties": {"north": {"type": "number"}, "east": {"type": "number"}},
            "required": ["north", "east"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "tags", "where"],
    "additionalProperties": False,
}


class MadeVocabulary:
    """Byte-level BPE tokenizer of VOCABULARY tokens, merged at random from a seed."""

    thinks = False
    added_tokens = MARKERS

    def __init__(self) -> None:
        symbols, rng = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
        found, merges = dict.fromkeys(symbols), []
        letters = [s for s in symbols if s.isascii() and s.isalpha()] + ["\u0120"]  # a blank
        for parts, most in ((symbols, 4000), (letters, VOCABULARY - len(MARKERS))):
            known = list(parts)
            while len(found) < most:
                first, second = rng.choice(known), rng.choice(parts if len(known) < 3000 else known)
                if first + second not in found and len(first + second) < 16:
                    found[first + second] = None
                    known.append(first + second)
                    merges.append((first, second))
        self._backend = Tokenizer(BPE({token: n for n, token in enumerate(found)}, merges))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        self._backend.add_tokens([AddedToken(name, normalized=False) for name in MARKERS])
        assert self._backend.get_vocab_size() == VOCABULARY
        self.end_id = VOCABULARY - len(MARKERS)

    def tokenizer_json(self) -> str:
        """Return the tokenizer's file."""
        return self._backend.to_str()

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        return self._backend.decode(token_ids)

    def encode_words(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._backend.encode(text).ids


class Replies:
    """Eight replies that go on for ever: where a grammar has ended, it begins anew."""

    def __init__(self, grammar: Grammar | None):
        self._grammar = grammar
        params = SamplingParams(True, temperature=0.7, top_k=20, top_p=0.8)
        self.samplers = [
            Sampler(params, VOCABULARY, RequestRandom(seed).thinker) for seed in range(SLOTS)
        ]
        self.states: list[GrammarState] = []
        if grammar is not None:
            self.states = [grammar.begin(frozenset((grammar.end_id,))) for _ in range(SLOTS)]

    def write(self, token_ids: Sequence[int]) -> None:
        """Note the tokens that were sampled."""
        for number, (state, token_id) in enumerate(zip(self.states, token_ids, strict=False)):
            assert self._grammar is not None
            ended = token_id == self._grammar.end_id or state.push(token_id)
            if ended:
                self.states[number] = self._grammar.begin(frozenset((self._grammar.end_id,)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("grammar", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--steps", type=positive, default=300, help="iterations of each kind")
    return run("grammar", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Time the iterations in turn."""
    vocabulary = MadeVocabulary()
    grammars = Grammars(vocabulary, VOCABULARY, vocabulary.end_id)
    asked = RequestOptions.parse({"grammar": {"json": SCHEMA}})
    first_s = timed(lambda: grammars.compile(asked))
    compile_s = [timed(lambda: grammars.compile(asked)) for _ in range(20)]
    kinds = {"free": Replies(None), "grammar": Replies(grammars.compile(asked))}
    sample_ids, masks, rng = host_sampler(), MaskThread(), np.random.default_rng(0)
    logits = [torch.from_numpy(rng.standard_normal((1, VOCABULARY), np.float32)) for _ in range(64)]
    steps_s: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with (
        chosen_checkpoint(options) as checkpoint,
        loaded_engines(checkpoint, options, SLOTS) as (conversation, engines),
    ):
        prompt = conversation.prompt(written_messages(conversation, PROMPT_TOKENS))
        for slot in range(SLOTS):
            engines.thinker.prefill(slot, prompt)
        slots, tokens = list(range(SLOTS)), [conversation.newline_id] * SLOTS

        def iterate(replies: Replies, number: int) -> None:
            wait = masks.start(replies.states)
            steps_s.append(timed(lambda: engines.thinker.step(slots, tokens)))
            wait()
            for sampler, state in zip(replies.samplers, replies.states, strict=False):
                sampler.mask = state.mask
            drawn = [logits[(number + 7 * slot) % len(logits)] for slot in slots]
            replies.write(sample_ids(replies.samplers, drawn))

        for number in range(options.steps):
            for kind, replies in kinds.items():
                seconds[kind].append(timed(partial(iterate, replies, number)))
    masks.close()
    rows: list[dict[str, Any]] = [
        {"kind": kind, "median_us": 1e6 * statistics.median(found), "p95_us": 1e6 * _p95(found)}
        for kind, found in (*seconds.items(), ("step of the engine", steps_s))
    ]
    pairs = zip(seconds["grammar"], seconds["free"], strict=True)
    added_s = statistics.median(one - other for one, other in pairs)
    summary = {
        "added_us": 1e6 * added_s,
        "share_of_step": added_s / statistics.median(steps_s),
        "compile_ms": 1e3 * statistics.median(compile_s),
        "first_compile_s": first_s,
    }
    return rows, summary


def _p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


if __name__ == "__main__":
    sys.exit(main())
