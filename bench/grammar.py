"""Cost of a grammar: eight replies held to a JSON schema, beside eight free ones.

    python -m bench.grammar --size small

An iteration is what the thinker's stage does for eight requests: the engine's step, the sampling of
eight tokens from a vocabulary of the released size (151,936, synthetic: the model's own logits are
not read), and with a grammar the masks, made in other processes while the engine computes. Both
kinds of iteration run in turn. `added` is what a grammar adds to an iteration's time, `cpu` to the
processors' time of all processes, each with its share of the engine's step; `late` is the share of
masks for which a step did not wait. `compile_ms` is the time to compile a grammar.

Then the first tokens of the checkpoint's replies are timed, free ones and held to a schema, in
turn. Then a free reply, token by token, alone; beside as
many processes that compute at the lowest priority as there are cores; and beside slow grammars of
other owners, sent without end.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from bench.common.measure import timed
from bench.common.models import (
    add_model_arguments,
    chosen_checkpoint,
    loaded_engines,
    written_messages,
)
from qwen3_omni_neuron import Qwen3Omni, TextDelta
from qwen3_omni_neuron.cpu.native.installed import host_sampler
from qwen3_omni_neuron.engines.noise import THINKER, Noise
from qwen3_omni_neuron.engines.sampling import Sampler, SamplingParams
from qwen3_omni_neuron.errors import BusyError, GrammarError, OptionError
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.runtime.grammar import Grammar, Grammars, GrammarState, wait_for_masks
from qwen3_omni_neuron.runtime.thinker_stage import MASK_WAIT_S
from test.hostile.attacks.grammars import CRASHES, SLOW
from testing.command_line import Figures, parser_of, positive, run
from testing.headlines import headline
from testing.subprocesses import children

SLOTS, VOCABULARY, PROMPT_TOKENS = 8, 151_936, 64
HELLO = [{"role": "user", "content": "Hello"}]
PROCESS_CLOCK = 2  # in the kernel's number of another process's CPU clock
MEASURED_S, NO_TOKEN = 20.0, 1 << 30
FIRST_TOKENS = 100
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

    def encode_exactly(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._backend.encode(text).ids


class Replies:
    """Eight replies that go on for ever: where a grammar has ended, it begins anew."""

    def __init__(self, make: Callable[[], Grammar] | None, end_id: int):
        self._make, self._ends = make, frozenset({end_id})
        params = SamplingParams(True, temperature=0.7, top_k=20, top_p=0.8)
        self.samplers = [Sampler(params, VOCABULARY, Noise(seed, THINKER)) for seed in range(SLOTS)]
        self.states: list[GrammarState] = []
        self.pids: list[int] = []
        if make is not None:
            self.states = [self._begun() for _ in range(SLOTS)]

    def renew(self, server: int | None) -> None:
        """Begin anew where a grammar has ended. server: parent of the processes of grammars."""
        for number, state in enumerate(self.states):
            if not state.pending and (state.ended or state.error is not None):
                state.close()
                self.states[number] = self._begun()
        wait_for_masks(self.states, 0.0)
        self.pids = children(server) if self.states and server is not None else []

    def write(self, token_ids: Sequence[int], ready: Sequence[int]) -> None:
        """Note the tokens that were sampled for the replies that were ready."""
        for number, token_id in zip(ready, token_ids, strict=True):
            if self.states:
                self.states[number].push(token_id)

    def _begun(self) -> GrammarState:
        assert self._make is not None
        return self._make().begin(self._ends, 1 << 20)  # no reply comes near its limit


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

    def compiled(title: str = "") -> Grammar:
        asked = RequestOptions.parse({"grammar": {"json": {**SCHEMA, "title": title}}})
        grammar = grammars.compile(asked)
        assert isinstance(grammar, Grammar)
        return grammar

    first_s = timed(compiled)
    compile_s = [timed(partial(compiled, f"schema {number}")) for number in range(20)]
    kinds = {
        kind: Replies(make, vocabulary.end_id)
        for kind, make in (("free", None), ("grammar", compiled))
    }
    sample_ids, rng = host_sampler(), np.random.default_rng(0)
    logits = [torch.from_numpy(rng.standard_normal((1, VOCABULARY), np.float32)) for _ in range(64)]
    steps_s: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    late = 0
    with (
        chosen_checkpoint(options) as checkpoint,
        loaded_engines(checkpoint, options, SLOTS) as (prompt_builder, engines),
    ):
        prompt = prompt_builder.prompt(written_messages(prompt_builder, PROMPT_TOKENS))
        for slot in range(SLOTS):
            engines.thinker.prefill(slot, prompt)
        slots, tokens = list(range(SLOTS)), [prompt_builder.newline_id] * SLOTS

        def iterate(kind: str, replies: Replies, number: int) -> None:
            nonlocal late
            begun_s, child_s = time.thread_time(), masks_cpu_s(replies)
            wait_for_masks(replies.states, 0.0)
            before_s = time.thread_time()
            steps_s.append(timed(lambda: engines.thinker.step(slots, tokens)))
            after_s = time.thread_time()
            wait_for_masks(replies.states, MASK_WAIT_S)
            ready = slots
            if replies.states:
                ready = [n for n, state in enumerate(replies.states) if not state.pending]
                late += SLOTS - len(ready)
                for slot in ready:
                    replies.samplers[slot].mask = replies.states[slot].mask
            drawn = [logits[(number + 7 * slot) % len(logits)] for slot in ready]
            if ready:
                replies.write(sample_ids([replies.samplers[n] for n in ready], drawn), ready)
            own_s = time.thread_time() - after_s + before_s - begun_s
            cpu_s[kind].append(own_s + masks_cpu_s(replies) - child_s)

        for number in range(options.steps):
            for kind, replies in kinds.items():
                replies.renew(grammars._pool._pool.pid)
                seconds[kind].append(timed(partial(iterate, kind, replies, number)))
    grammars.close()
    rows: list[dict[str, Any]] = [
        {"kind": kind, **times_of(found)}
        for kind, found in (*seconds.items(), ("step of the engine", steps_s))
    ]
    step_s = statistics.median(steps_s)
    kinds_of_time = seconds, cpu_s
    added_s, added_cpu_s = (
        statistics.median(np.subtract(found["grammar"], found["free"])) for found in kinds_of_time
    )
    summary = {
        "added_us": 1e6 * added_s,
        "added_share": added_s / step_s,
        "cpu_us": 1e6 * added_cpu_s,
        "cpu_share": added_cpu_s / step_s,
        "late_share": late / (options.steps * SLOTS),
        "compile_ms": 1e3 * statistics.median(compile_s),
        "first_compile_s": first_s,
    }
    with chosen_checkpoint(options) as checkpoint:
        beside = replies_of(str(checkpoint))
    rows += [{"kind": kind, **times_of(found)} for kind, found in beside.items()]
    headlines = [
        headline("CPU time that grammars add to a step", [1e3 * added_cpu_s], "ms", "goal 0.32"),
        headline("of the step", [summary["cpu_share"]], "%"),
        headline("compiling a new grammar", compile_s, "s"),
    ]
    return rows, summary, headlines


def replies_of(model: str) -> dict[str, list[float]]:
    """Return times of first tokens, and between a free reply's tokens, by what else happens."""
    found: dict[str, list[float]] = {}
    with Qwen3Omni.load(model) as omni:
        omni.generate_text(HELLO, grammar={"regex": "a"})
        found |= first_tokens(omni)
        found["token alone"] = gaps_of(omni)
        spin = [sys.executable, "-c", "import os; os.nice(19)\nwhile True: pass"]
        idle = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
        try:
            found["token beside idle work"] = gaps_of(omni)
        finally:
            for process in idle:
                process.kill()
                process.wait()
        over = threading.Event()

        def attack(owner: str, grammar: Mapping[str, Any]) -> None:
            while not over.is_set():
                with suppress(OptionError, GrammarError, BusyError):
                    omni.generate_text(
                        HELLO, grammar=grammar, owner=owner, thinker_max_new_tokens=16
                    )

        with ThreadPoolExecutor(len(SLOW) + len(CRASHES)) as pool:
            for label, grammar in (*SLOW, *CRASHES):
                pool.submit(attack, label, grammar)
            try:
                found["token beside slow grammars"] = gaps_of(omni)
            finally:
                over.set()
    return found


def first_tokens(omni: Qwen3Omni) -> dict[str, list[float]]:
    """Return the times to the first token of replies, by their grammars."""
    found: dict[str, list[float]] = {}
    for number in range(FIRST_TOKENS):
        schemas = {"free": None, "schema": {**SCHEMA, "title": number}}
        for kind, schema in schemas.items():
            held: Any = {} if schema is None else {"grammar": {"json": schema}}
            start_s = time.perf_counter()
            reply = omni.stream_text(HELLO, thinker_max_new_tokens=2, **held)
            next(reply)
            found.setdefault(f"first token, {kind}", []).append(time.perf_counter() - start_s)
            reply.close()
    return found


def gaps_of(omni: Qwen3Omni) -> list[float]:
    """Return the times between the tokens of free replies, for MEASURED_S seconds."""
    found: list[float] = []
    end_s = time.monotonic() + MEASURED_S
    while time.monotonic() < end_s:
        # No token ends a reply: each goes on to its limit.
        options: Any = {"thinker_max_new_tokens": 256, "thinker_eos_token_id": NO_TOKEN}
        last_s = None
        for event in omni.stream_text(HELLO, **options):
            if isinstance(event, TextDelta):
                now = time.monotonic()
                if last_s is not None:
                    found.append(now - last_s)
                last_s = now
    return found


def masks_cpu_s(replies: Replies) -> float:
    """Return the CPU time of the processes that make the masks."""
    found = 0.0
    for pid in replies.pids:
        with suppress(OSError):  # it has ended
            found += time.clock_gettime(~pid << 3 | PROCESS_CLOCK)
    return found


def times_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return the columns of a row."""
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "median_us": 1e6 * statistics.median(seconds),
        "p95_us": 1e6 * cuts[94],
        "p99_us": 1e6 * cuts[98],
    }


if __name__ == "__main__":
    sys.exit(main())
