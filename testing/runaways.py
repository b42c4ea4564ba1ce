"""Good replies of the checkpoint that ships, and replies of it that are made to run away.

Every good reply must end by itself, and every made one must be ended.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni, SpeechResult
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.events import Event, Finished
from train.vocabulary import MOST_WORDS, SPEAKERS, SPOKEN, prompts

SLOTS = 8
TURNS = 3  # of a session
SHORT: dict[str, Any] = {"thinker_max_new_tokens": 16}
KINDS = ("silence", "cycle", "noise")
SURE = 32.0  # a forced code's logit: the end code's probability is about 1e-15
END_ID = 358  # the codec's end code
SILENT_CODES = (0, 1)  # codes 0 of a word's fading and of the silence after it, -99 dBFS


@dataclass(frozen=True)
class Text:
    """A text to speak, and how."""

    words: str
    options: dict[str, Any]


def drawn_text(rng: random.Random, most_words: int) -> Text:
    """Draw words that the checkpoint can say, a voice and a seed."""
    words = " ".join(rng.choice(SPOKEN) for _ in range(rng.randint(1, most_words)))
    return Text(words, _voice(rng))


def good_replies(omni: Qwen3Omni, seed: int) -> Iterator[SpeechResult]:
    """Yield sampled replies without end: texts of up to 12 words, and turns of sessions."""
    rng = random.Random(f"good {seed}")
    while True:
        drawn = [drawn_text(rng, 12) for _ in range(SLOTS)]
        yield from results_of([omni.stream_speech(text.words, **text.options) for text in drawn])
        sessions = [omni.session(**_voice(rng)) for _ in range(SLOTS)]
        for _ in range(TURNS):
            for session in sessions:
                session.append(prompts(rng, 1, heard=False, held_out=False)[0].words)
            yield from results_of(
                [session.respond(seed=rng.randrange(2**31), **SHORT) for session in sessions]
            )


def results_of(streams: Sequence[Iterator[Event]]) -> list[SpeechResult]:
    """Read streams, which run at the same time, to their ends."""
    last = [list(stream)[-1] for stream in streams]
    return [event.result for event in last if isinstance(event, Finished)]


class RunawayTalker:
    """A talker that makes no end code: where it would end, its logits are forced to go on.

    kind: the frames that follow. silence: the last silent frame again and again; cycle: the reply's
    last few frames over and over; noise: its frames with sound in random order. said: by
    slot, the frames of the last reply before it was forced.
    """

    def __init__(self, engine: Any, kind: str):
        self._engine, self._kind = engine, kind
        self._rng = random.Random(kind)
        self.said: dict[int, list[Tensor]] = {}
        self._forced: dict[int, list[Tensor]] = {}  # by slot: frames to come, the next one last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        self.said[slot] = []
        self._forced.pop(slot, None)
        return self._engine.prefill(slot, accepted, first_token)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        logits = self._engine.step(slots, token_ids).clone()
        for row, slot in zip(logits, slots, strict=True):
            if slot in self._forced or int(row.argmax()) == END_ID:
                forced = self._forced.setdefault(slot, [])
                if not forced:
                    forced += reversed(self._more(self.said[slot]))
                row.zero_()
                row[forced[-1][0]] = SURE
        return logits

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        frames = self._engine.predict(slots, code0, sampling).clone()
        for frame, slot in zip(frames, slots, strict=True):
            if slot in self._forced:
                frame[:] = self._forced[slot].pop()
            else:
                self.said[slot].append(frame)
        return frames

    def _more(self, said: list[Tensor]) -> list[Tensor]:
        """Return the next frames of a runaway."""
        if self._kind == "silence":
            return [frame for frame in said if int(frame[0]) == SILENT_CODES[-1]][-1:]
        loud = [frame for frame in said if int(frame[0]) not in SILENT_CODES]
        if self._kind == "cycle":
            return loud[-1 - len(said) % 12 :]
        return self._rng.choices(loud, k=len(loud))


@dataclass(frozen=True)
class Made:
    """A reply that was made to run away, after its first `said` frames."""

    text: Text
    result: SpeechResult
    said: int


@contextmanager
def running_away(kind: str) -> Iterator[tuple[Qwen3Omni, RunawayTalker]]:
    """Load the checkpoint with a talker that never ends, until the block does."""
    talkers: list[RunawayTalker] = []

    def put_in(engines: Engines) -> Engines:
        talkers.append(RunawayTalker(engines.talker, kind))
        return replace(engines, talker=talkers[0])

    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=SLOTS, wrap_engines=put_in) as omni:
        yield omni, talkers[0]


def made_replies(kind: str, count: int) -> list[Made]:
    """Speak texts with a talker that never ends."""
    rng = random.Random(f"made {kind}")
    drawn = [drawn_text(rng, MOST_WORDS) for _ in range(count)]
    made: list[Made] = []
    with running_away(kind) as (omni, talker):
        for start in range(0, count, SLOTS):
            some = drawn[start : start + SLOTS]
            streams = [omni.stream_speech(text.words, **text.options) for text in some]
            for text, stream, result in zip(some, streams, results_of(streams), strict=True):
                made.append(Made(text, result, len(talker.said[stream.slot])))
    return made


def _voice(rng: random.Random) -> dict[str, Any]:
    return {"speaker": rng.choice(SPEAKERS), "seed": rng.randrange(2**31)}
