"""The real pipeline on a virtual clock, over engines that only spend time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from qwen3_omni_neuron.events import Event, Finished, SpeechResult
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import prompt_keys
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import Request
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.prompts import prompt_of
from testing.timed_engines import Script, Sizes, Times, samples_of, spoken_frames, timed_engines
from testing.virtual_clock import VirtualClock

EOS = 383
GREEDY = RequestOptions(
    seed=0,
    thinker_do_sample=False,
    talker_do_sample=False,
    talker_repetition_penalty=1.0,
    predictor_do_sample=False,
)


@dataclass(frozen=True)
class Codec:
    """Codec of a reply whose tokens spell what `decode` says; no text of it is encoded."""

    decode: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids))

    def encode_exactly(self, text: str) -> list[int]:
        """Raise AssertionError."""
        raise AssertionError(f"a stop string began inside a token, at {text!r}")


@dataclass
class Call:
    """One engine call: its start, its slots, and its size, see testing.timed_engines.Script."""

    name: str
    at_s: float
    slots: tuple[int, ...]
    size: int


@dataclass
class Simulation:
    """A pipeline on a virtual clock that answers a prompt with its own token ids, then EOS."""

    config: OmniConfig
    times: Times = field(default_factory=Times)
    sizes: Sizes = field(default_factory=Sizes)
    frames: int | None = None
    max_queued: int = 16
    shares_cores: bool = False

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.calls: list[Call] = []
        assert self.config.talker is not None
        script = Script(
            reply=lambda prompt: [*prompt.token_ids.tolist(), EOS],
            codec_eos_id=self.config.talker.codec_eos_id,
            frames=self.frames,
            on_call=self._on_call,
        )
        engines = timed_engines(self.clock, self.times, script, self.sizes)
        engines = replace(engines, shares_cores=self.shares_cores)
        self.pipeline = Pipeline(engines, self.config, self.max_queued, self.clock)

    def on_call(self, name: str, slots: Sequence[int]) -> None:
        """Do nothing; a test replaces this to make an engine fail or stall."""

    def _on_call(self, name: str, slots: Sequence[int], size: int) -> None:
        self.calls.append(Call(name, self.clock.now(), tuple(slots), size))
        self.on_call(name, slots)

    def request(
        self,
        tokens: Sequence[int],
        frames: int = 20,
        *,
        speak: bool = True,
        thinker_limit: int = 1000,
        chunk_frames: tuple[int, ...] | None = None,
        first_chunk: str = "steady",
        runaway_speech: str = "keep",
        first_token_timeout_s: float = 1e6,
        wait_timeout_s: float = 1e6,
        cache_key: str | None = None,
        owner: str | None = None,
        stop: Sequence[str] = (),
        decode_text: Callable[[list[int]], str] = Codec.decode,
    ) -> Request:
        """Make a request whose reply is `tokens`; the talker's limit leaves `frames` frames."""
        prompt = prompt_of(torch.tensor(list(tokens), dtype=torch.int64))
        options = replace(
            GREEDY,
            thinker_max_new_tokens=thinker_limit,
            thinker_eos_token_id=EOS,
            stop=stop,
            talker_max_new_tokens=frames + 1,
            chunk_frames=chunk_frames,
            first_chunk=first_chunk,
            runaway_speech=runaway_speech,
            cache_key=cache_key,
            owner=owner,
            first_token_timeout_s=first_token_timeout_s,
            wait_timeout_s=wait_timeout_s,
        )
        keys = prompt_keys(prompt, self.config, cache_key)
        return Request(prompt, options, speak, self.clock.now(), Codec(decode_text), keys)

    def start(self, tokens: Sequence[int], frames: int = 20, **options: Any) -> SpeechStream:
        """Start a request; see `request`."""
        return SpeechStream(self.pipeline, self.request(tokens, frames, **options), owner=self)

    def called(self, name: str) -> list[Call]:
        """Return the calls of one kind, in order."""
        return [call for call in self.calls if call.name == name]

    def assert_idle(self) -> None:
        """Assert that every slot is free and no stage has a request."""
        assert sorted(self.pipeline._free_slots) == list(range(self.sizes.slots))
        assert not any(stage._tasks for stage in self.pipeline._stages)

    def expected_codes(
        self, tokens: Sequence[int], frames: int, limit: int | None = None
    ) -> list[torch.Tensor]:
        """Return the codes of one pass over the whole text: its rows, tts_eos once, then tts_pad.

        limit: the thinker's token limit, if it cuts the text.
        """
        pads = [self.config.tts_pad_id] * frames
        prompt = prompt_of(torch.tensor(list(tokens))).talker
        rows = [*tokens[:limit], self.config.tts_eos_id, *pads]
        speaker_id = GREEDY.speaker_id(self.config)
        return spoken_frames(prompt, speaker_id, rows, frames)

    def assert_right(self, result: SpeechResult, tokens: Sequence[int], frames: int) -> None:
        """Assert that text, codes and samples equal those of the stages run in sequence."""
        assert result.token_ids == [*tokens, EOS]
        expected = self.expected_codes(tokens, frames)
        assert len(result.codes) == frames
        for number, (ours, right) in enumerate(zip(result.codes, expected, strict=True)):
            assert ours.tolist() == right.tolist(), f"frame {number} is the first that differs"
        assert np.array_equal(result.audio, samples_of(expected))


def finish(stream: SpeechStream) -> SpeechResult:
    """Take all events; return the last one's result."""
    events: list[Event] = list(stream)
    assert isinstance(events[-1], Finished)
    return events[-1].result
