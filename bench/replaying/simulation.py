"""A replay: the package's runtime over timed engines, and clients on a virtual clock."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.common.metrics import playback
from bench.common.observed import take_events
from bench.replaying.device import Behaviour, CoreGroups, Device, Span
from bench.replaying.load import RequestLengths
from bench.replaying.profiles import WINDOW_MEL_FRAMES, StageProfile
from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.events import SpeechResult
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import Request, TalkerRequest, ThinkerRequest
from qwen3_omni_neuron.runtime.sampling import SamplingParams
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.released import RELEASED, TALKER
from testing.timed_engines import Script, Sizes, TimedTalker, TimedThinker, TimedVocoder, Times
from testing.virtual_clock import VirtualClock

EOS, VOCAB = 383, 384
GREEDY = SamplingParams(do_sample=False)
NEVER_S = 1e6


@dataclass(frozen=True)
class Reply:
    """A request's result, and how a player that starts at the first sample plays it.

    underruns: how often it waited for audio; silent_s: for how long in all; chunks: sizes of the
    chunks in frames.
    """

    result: SpeechResult
    underruns: int
    silent_s: float
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Replayed:
    """Replies, in the order in which they ended, and the spans of all engine calls."""

    replies: list[Reply]
    spans: list[Span]


def replay(
    profile: StageProfile,
    behaviour: Behaviour,
    placement: str,
    concurrency: int,
    load: Sequence[RequestLengths],
) -> Replayed:
    """Run requests through a pipeline of `concurrency` slots. placement: one of PLACEMENTS.

    Raises ProfileError for a call that the profile has no time for.
    """
    assert all(lengths.text_tokens >= behaviour.start_after for lengths in load)
    clock = VirtualClock()
    cores = CoreGroups(clock, placement)
    device = Device(clock, profile, behaviour, cores)
    sizes = Sizes(concurrency, 65536, VOCAB, TALKER.text.vocab_size, behaviour.buckets)

    def reply(prompt: Prompt) -> list[int]:
        return [1] * load[int(prompt.token_ids[0])].text_tokens + [EOS]

    script = Script(reply, TALKER.codec_eos_id, on_call=device.on_call)
    engines = Engines(
        _EncodingThinker(device, clock, script, sizes),
        TimedTalker(clock, Times(), script, sizes),
        TimedVocoder(clock, Times(), script, sizes),
        shares_cores=placement == "shared" and behaviour.right_of_way,
    )
    pipeline = Pipeline(engines, RELEASED, 0, clock)
    try:
        replies = _Clients(pipeline, clock, profile).run(load, behaviour, concurrency)
    finally:
        pipeline.close()
    return Replayed(replies, cores.spans)


def take_reply(stream: SpeechStream, arrived_s: float, clock: VirtualClock) -> Reply:
    """Take all events of a request as they come."""
    events, result = take_events(stream, arrived_s, clock.now)
    underruns, silent_s = playback(events.chunks, events.sample_rate)
    return Reply(result, underruns, silent_s, tuple(chunk.frames for chunk in events.chunks))


class _EncodingThinker(TimedThinker):
    """Timed thinker that encodes a prompt's audio before its prefill."""

    def __init__(self, device: Device, clock: VirtualClock, script: Script, sizes: Sizes):
        super().__init__(clock, Times(), script, sizes)
        self._device = device

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (mel,) = prompt.audio_mel
        self._device.encode(math.ceil(mel.shape[1] / WINDOW_MEL_FRAMES))
        return super().prefill(slot, prompt, start)


class _Clients:
    """Clients that each send the next request as soon as their last one has ended."""

    def __init__(self, pipeline: Pipeline, clock: VirtualClock, profile: StageProfile):
        self._pipeline, self._clock, self._profile = pipeline, clock, profile
        self._ended = clock.condition(threading.RLock())
        self._working = 0
        self._replies: list[Reply] = []
        self._error: Exception | None = None

    def run(self, load: Sequence[RequestLengths], behaviour: Behaviour, count: int) -> list[Reply]:
        """Send all requests from `count` clients. Raises the first error of a request."""
        todo = iter(enumerate(load))  # one client works at a time: see VirtualClock
        self._working = count

        def client() -> None:
            try:
                for number, lengths in todo:
                    self._replies.append(self._ask(number, lengths, behaviour))
            except Exception as error:
                self._error = self._error or error
            with self._ended:
                self._working -= 1
                self._ended.notify_all()

        threads = [self._clock.thread(client, f"client-{n}") for n in range(count)]
        for thread in threads:
            thread.start()
        with self._ended:
            while self._working:
                self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._replies

    def _ask(self, number: int, lengths: RequestLengths, behaviour: Behaviour) -> Reply:
        arrived_s = self._clock.now()
        self._clock.sleep(self._profile.seconds("preprocessing", lengths.audio_s))
        prompt = _prompt(number, lengths)
        thinker = ThinkerRequest(
            prompt, GREEDY, lengths.text_tokens + 1, frozenset((EOS,)), lambda ids: "." * len(ids)
        )
        talker = TalkerRequest(
            prompt.talker, 0, GREEDY, GREEDY, lengths.frames + 1, behaviour.chunk_frames
        )
        request = Request(thinker, talker, number, arrived_s, NEVER_S, NEVER_S)
        return take_reply(SpeechStream(self._pipeline, request, owner=self), arrived_s, self._clock)


def _prompt(number: int, lengths: RequestLengths) -> Prompt:
    """Make a prompt of zeros whose first token id is the request's number."""
    ids = torch.zeros(lengths.prompt_rows, dtype=torch.int64)
    ids[0] = number
    talker = TalkerPrompt(
        ids[: lengths.talker_rows - ASSISTANT_ROWS], torch.zeros(3, lengths.talker_rows)
    )
    mel = torch.zeros(1, round(100 * lengths.audio_s))
    return Prompt(ids, torch.zeros(3, lengths.prompt_rows), talker, (mel,))
