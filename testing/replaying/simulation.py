"""A replay: the package's runtime over timed engines, and clients on a virtual clock."""

import dataclasses
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.events import SpeechResult
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import Prompt, PromptKeys, RowKeys, TalkerPrompt
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import Request
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.metrics import playback
from testing.observed import take_events
from testing.released import RELEASED, TALKER
from testing.replaying.device import Behaviour, CoreGroups, Device, Span
from testing.replaying.load import SYSTEM_ROWS, RequestLengths
from testing.replaying.profiles import WINDOW_MEL_FRAMES, StageProfile
from testing.timed_engines import Script, Sizes, TimedTalker, TimedThinker, TimedVocoder, Times
from testing.virtual_clock import VirtualClock

EOS, VOCAB = 383, 384
NEVER_S = 1e6
GREEDY = RequestOptions(
    thinker_do_sample=False,
    thinker_eos_token_id=EOS,
    talker_do_sample=False,
    talker_repetition_penalty=1.0,
    predictor_do_sample=False,
    runaway_speech="keep",
    first_token_timeout_s=NEVER_S,
    wait_timeout_s=NEVER_S,
)
LONGEST_AHEAD_S = 30.0


@dataclass(frozen=True)
class Reply:
    """A request's result, and how a player that starts at the first sample plays it.

    underruns: how often the player waited for audio; silent_s: the sum of these waits; chunks:
    sizes of the chunks in frames.
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
    """Run requests through a pipeline with `concurrency` slots. placement: one of PLACEMENTS.

    Raises ProfileError for a call for which the profile has no time.
    """
    assert all(lengths.text_tokens >= behaviour.start_after for lengths in load)
    clock = VirtualClock()
    cores = CoreGroups(clock, placement)
    pipeline = _pipeline(clock, cores, profile, behaviour, concurrency, load)
    try:
        replies = _Clients(pipeline, clock, profile).run(load, behaviour, concurrency)
    finally:
        pipeline.close()
    return Replayed(replies, cores.spans)


def replay_after_speech(
    profile: StageProfile,
    behaviour: Behaviour,
    placement: str,
    load: Sequence[RequestLengths],
    held_rows: int,
    others: int,
) -> list[float]:
    """Ask each request when its speech ends, with its first rows computed while it arrived.

    held_rows: rows of each prompt that were prefilled ahead; 0 for none. others: number of clients
    that ask cold requests of the same lengths meanwhile, each after hearing its last reply. Returns
    the seconds from the end of each request's speech to its first sample.
    """
    clock = VirtualClock()
    cores = CoreGroups(clock, placement)
    pipeline = _pipeline(clock, cores, profile, behaviour, others + 2, load)
    clients = _Clients(pipeline, clock, profile)
    asked, ended = False, []

    def talk(number: int) -> None:
        while not asked:
            number = (number + 1) % len(load)
            timings = clients.ask(number, load[number], behaviour).result.timings
            clock.sleep(timings.audio_s - timings.total_s)
        ended.append(number)

    try:
        for number in range(others):
            clock.thread(partial(talk, number), f"other-{number}").start()
        found = []
        for number, lengths in enumerate(load):
            clock.sleep(lengths.audio_s)
            if held_rows:
                ahead = pipeline.prefill_ahead(
                    clients.request(number, lengths, behaviour, held_rows)
                )
                # The speech lasts until the rows are computed, if these are late.
                until_s = clock.now() + LONGEST_AHEAD_S
                while not ahead.ended and clock.now() < until_s:
                    clock.sleep(0.1)
                pipeline.cancel(ahead, LONGEST_AHEAD_S)
            reply = clients.ask(number, lengths, behaviour, keyed=True)
            ttfb_s = reply.result.timings.ttfb_s
            assert ttfb_s is not None, "every reply of a load speaks"
            found.append(ttfb_s)
        asked = True
        while len(ended) < others:
            clock.sleep(1.0)
    finally:
        pipeline.close()
    return found


def _pipeline(
    clock: VirtualClock,
    cores: CoreGroups,
    profile: StageProfile,
    behaviour: Behaviour,
    slots: int,
    load: Sequence[RequestLengths],
) -> Pipeline:
    """Start a pipeline whose replies have the lengths of the load: see _prompt."""
    device = Device(clock, profile, behaviour, cores)
    sizes = Sizes(slots, 65536, VOCAB, TALKER.text.vocab_size, behaviour.buckets)

    def reply(prompt: Prompt) -> list[int]:
        return [1] * load[int(prompt.token_ids[0])].text_tokens + [EOS]

    script = Script(reply, TALKER.codec_eos_id, on_call=device.on_call)
    engines = Engines(
        _EncodingThinker(device, clock, script, sizes),
        TimedTalker(clock, Times(), script, sizes),
        TimedVocoder(clock, Times(), script, sizes),
        shares_cores=cores.shared and behaviour.knows_cores,
    )
    return Pipeline(engines, RELEASED, 0, clock)


def take_reply(stream: SpeechStream, arrived_s: float, clock: VirtualClock) -> Reply:
    """Take all events of a request as they arrive."""
    events, result = take_events(stream, arrived_s, clock.now)
    underruns, silent_s = playback(events.chunks, events.sample_rate)
    return Reply(result, underruns, silent_s, tuple(chunk.frames for chunk in events.chunks))


class _EncodingThinker(TimedThinker):
    """Timed thinker that encodes a prompt's audio before its prefill."""

    def __init__(self, device: Device, clock: VirtualClock, script: Script, sizes: Sizes):
        super().__init__(clock, Times(), script, sizes)
        self._device = device

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (mel,) = prompt.audio_mel
        windows = math.ceil(mel.shape[1] / WINDOW_MEL_FRAMES)
        self._device.encode(min(windows, 1) if start else windows)  # the window still open
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
                    self._replies.append(self.ask(number, lengths, behaviour))
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

    def ask(
        self, number: int, lengths: RequestLengths, behaviour: Behaviour, keyed: bool = False
    ) -> Reply:
        """Send a request and take its reply. keyed: whether it uses the prefix cache."""
        arrived_s = self._clock.now()
        self._clock.sleep(self._profile.seconds("preprocessing", lengths.audio_s))
        rows = lengths.prompt_rows if keyed else 0
        request = self.request(number, lengths, behaviour, rows)
        request = dataclasses.replace(request, arrived_s=arrived_s)
        return take_reply(SpeechStream(self._pipeline, request, owner=self), arrived_s, self._clock)

    def request(
        self, number: int, lengths: RequestLengths, behaviour: Behaviour, keyed_rows: int
    ) -> Request:
        """Make a request of a prompt's first `keyed_rows` rows; 0: all rows, without keys."""
        prompt, keys = _prompt(number, lengths), None
        if keyed_rows:
            user_rows = min(keyed_rows - SYSTEM_ROWS, len(prompt.talker.token_ids))
            ids = prompt.token_ids[:keyed_rows]
            talks = dataclasses.replace(prompt.talker, token_ids=ids[:user_rows])
            prompt = dataclasses.replace(prompt, token_ids=ids, talker=talks)
            keys = PromptKeys(
                RowKeys(ids.numpy(), prompt.positions[:, :keyed_rows].numpy()),
                RowKeys(talks.token_ids.numpy(), talks.positions[:, :user_rows].numpy()),
            )
        options = dataclasses.replace(
            GREEDY,
            seed=number,
            thinker_max_new_tokens=lengths.text_tokens + 1,
            talker_max_new_tokens=lengths.frames + 1,
            chunk_frames=behaviour.chunk_frames,
        )
        return Request(prompt, options, True, self._clock.now(), Dots(), keys)


class Dots:
    """Codec of replies whose text does not matter."""

    def decode(self, token_ids: list[int]) -> str:
        """Return a dot for each token."""
        return "." * len(token_ids)

    def encode_exactly(self, text: str) -> list[int]:
        """Raise AssertionError: there are no stop strings."""
        raise AssertionError(text)


def _prompt(number: int, lengths: RequestLengths) -> Prompt:
    """Make a prompt of zeros whose first token id is the request's number."""
    ids = torch.zeros(lengths.prompt_rows, dtype=torch.int64)
    ids[0] = number
    talker = TalkerPrompt(
        ids[: lengths.talker_rows - ASSISTANT_ROWS], torch.zeros(3, lengths.talker_rows)
    )
    mel = torch.zeros(1, round(100 * lengths.audio_s))
    return Prompt(ids, torch.zeros(3, lengths.prompt_rows), talker, (mel,))
