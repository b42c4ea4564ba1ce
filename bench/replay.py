"""The real runtime over engines that only take time: a replay of stage latencies, no measurement.

    python -m bench.replay                                   # all of it, at the port's latencies
    python -m bench.replay --profile roofline --placement split --first-chunk adaptive
    python -m bench.replay --profile my-trn2.json --concurrency 1,8 --json replay.json

--profile: a name in bench/profiles, or a file (see bench.replaying.stage_profile). Each engine call
holds its cores for as long as the profile says, on a virtual clock; calls that share them take
turns. The schedule, the queues, the batches and the threads are the ones of the package. The first
row is port #167's way of driving the stages, which published what came of it: 1759 ms.

As many requests as `concurrency` says run at a time; the next one comes when one has ended. TTFB:
arrival to the first sample; RTF: (arrival of the last sample - arrival) / duration; underruns: of
players that start at the first sample.
"""

import argparse
import dataclasses
import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.common.results import results_of, save
from bench.replaying.core_groups import PLACEMENTS, CoreGroups, Span
from bench.replaying.device import Behaviour, Device
from bench.replaying.load import Conversation, conversations
from bench.replaying.player import Heard, listen
from bench.replaying.stage_profile import ProfileError, StageProfile
from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import Request, TalkerRequest, ThinkerRequest
from qwen3_omni_neuron.runtime.sampling import SamplingParams
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.released import RELEASED, TALKER
from testing.timed_engines import Script, Sizes, TimedTalker, TimedThinker, TimedVocoder, Times
from testing.virtual_clock import VirtualClock

PROFILES = Path(__file__).parent / "profiles"
PUBLISHED_TTFB_S = 1.759  # what port #167 measured, driven as PORT
PORT = Behaviour("port's", (25,), (25,), 5, inline_frames=25, context_frames=5, driver=True)
OURS = Behaviour("ours, adaptive")
MEL_A_WINDOW = 800  # 8 s
EOS, VOCAB = 383, 384
GREEDY = SamplingParams(do_sample=False)
NEVER_S = 1e6


@dataclass(frozen=True)
class Replayed:
    """What came of the requests, in the order in which they ended. spans: of all calls."""

    heard: list[Heard]
    spans: list[Span]


@dataclass(frozen=True)
class Row:
    """One line of the table, times in seconds. underruns, silent_s: of all requests together.
    first_chunks: sizes of the last request's first chunks, in frames."""

    kind: str
    profile: str
    driven: str
    placement: str
    concurrency: int
    requests: int
    ttft_mean_s: float
    ttfb_mean_s: float
    ttfb_p50_s: float
    ttfb_p95_s: float
    rtf_mean: float
    rtf_p95: float
    underruns: int
    silent_s: float
    first_chunks: tuple[int, ...]


class HearingThinker(TimedThinker):
    """Encodes a prompt's sound before it reads it."""

    def __init__(self, device: Device, clock: VirtualClock, script: Script, sizes: Sizes):
        super().__init__(clock, Times(), script, sizes)
        self._device = device

    def prefill(self, slot: int, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        (mel,) = prompt.audio_mel
        self._device.encode(math.ceil(mel.shape[1] / MEL_A_WINDOW))
        return super().prefill(slot, prompt)


class Clients:
    """So many at a time, each of which asks for the next request as soon as its last one ended."""

    def __init__(self, pipeline: Pipeline, clock: VirtualClock, profile: StageProfile):
        self._pipeline, self._clock, self._profile = pipeline, clock, profile
        self._ended = clock.condition(threading.RLock())
        self._working = 0
        self._heard: list[Heard] = []
        self._error: Exception | None = None

    def run(self, load: Sequence[Conversation], behaviour: Behaviour, count: int) -> list[Heard]:
        """All requests. Raises what ended the first that failed."""
        todo = iter(enumerate(load))  # one client works at a time: see VirtualClock
        self._working = count

        def client() -> None:
            try:
                for number, talk in todo:
                    self._heard.append(self._ask(number, talk, behaviour))
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
        return self._heard

    def _ask(self, number: int, talk: Conversation, behaviour: Behaviour) -> Heard:
        arrived_s = self._clock.now()
        self._clock.sleep(self._profile.seconds("preprocessing", talk.audio_s))
        prompt = _prompt(number, talk)
        thinker = ThinkerRequest(
            prompt, GREEDY, talk.text_tokens + 1, frozenset((EOS,)), lambda ids: "." * len(ids)
        )
        talker = TalkerRequest(
            prompt.talker, 0, GREEDY, GREEDY, talk.frames + 1, behaviour.chunk_frames
        )
        request = Request(thinker, talker, number, arrived_s, NEVER_S, NEVER_S)
        return listen(SpeechStream(self._pipeline, request, owner=self), self._clock)


def replay(
    profile: StageProfile,
    behaviour: Behaviour,
    placement: str,
    concurrency: int,
    load: Sequence[Conversation],
) -> Replayed:
    """Run requests through a pipeline of `concurrency` slots. placement: one of PLACEMENTS.

    Raises ProfileError for a call that the profile has no time for.
    """
    assert all(talk.text_tokens >= behaviour.start_after for talk in load)
    clock = VirtualClock()
    cores = CoreGroups(clock, placement)
    device = Device(clock, profile, behaviour, cores)
    sizes = Sizes(concurrency, 65536, VOCAB, TALKER.text.vocab_size, behaviour.buckets)

    def reply(prompt: Prompt) -> list[int]:
        return [1] * load[int(prompt.token_ids[0])].text_tokens + [EOS]

    script = Script(reply, TALKER.codec_eos_id, on_call=device.on_call)
    engines = Engines(
        HearingThinker(device, clock, script, sizes),
        TimedTalker(clock, Times(), script, sizes),
        TimedVocoder(clock, Times(), script, sizes),
    )
    pipeline = Pipeline(engines, RELEASED, 0, clock)
    try:
        heard = Clients(pipeline, clock, profile).run(load, behaviour, concurrency)
    finally:
        pipeline.close()
    return Replayed(heard, cores.spans)


def row(
    profile: StageProfile,
    behaviour: Behaviour,
    placement: str,
    concurrency: int,
    load: Sequence[Conversation],
) -> Row:
    """Replay, and what is to be said of it."""
    heard = replay(profile, behaviour, placement, concurrency, load).heard
    timings = [one.result.timings for one in heard]
    ttfb_s = [t.ttfb_s for t in timings if t.ttfb_s is not None]
    rtf = [t.rtf for t in timings if t.rtf is not None]
    return Row(
        kind="replay",
        profile=profile.name,
        driven=behaviour.name,
        placement=placement,
        concurrency=concurrency,
        requests=len(heard),
        ttft_mean_s=statistics.mean(t.ttft_s for t in timings),
        ttfb_mean_s=statistics.mean(ttfb_s),
        ttfb_p50_s=statistics.median(ttfb_s),
        ttfb_p95_s=_p95(ttfb_s),
        rtf_mean=statistics.mean(rtf),
        rtf_p95=_p95(rtf),
        underruns=sum(one.underruns for one in heard),
        silent_s=sum(one.silent_s for one in heard),
        first_chunks=heard[-1].chunks[:6],
    )


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown, every line labelled."""
    titles = "replay | stages driven | cores | at once | TTFT ms | TTFB ms mean, p50, p95"
    titles += " | RTF mean, p95 | underruns | silent ms | first chunks"
    lines = [f"| {titles} |", "| --- | --- | --- |" + " ---: |" * 6 + " --- |"]
    for r in rows:
        ttfb = ", ".join(f"{1e3 * s:.0f}" for s in (r.ttfb_mean_s, r.ttfb_p50_s, r.ttfb_p95_s))
        cells = [
            f"replay of {r.profile}",
            r.driven,
            r.placement,
            str(r.concurrency),
            f"{1e3 * r.ttft_mean_s:.0f}",
            ttfb,
            f"{r.rtf_mean:.2f}, {r.rtf_p95:.2f}",
            str(r.underruns),
            f"{1e3 * r.silent_s:.0f}",
            ", ".join(map(str, r.first_chunks)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def against_the_port(rows: Sequence[Row]) -> list[str]:
    """How the port's way compares with what the port measured, where the latencies are its own."""
    return [
        f"replay: driven the port's way, mean TTFB {1e3 * r.ttfb_mean_s:.0f} ms; the port measured "
        f"{1e3 * PUBLISHED_TTFB_S:.0f} ({100 * (r.ttfb_mean_s / PUBLISHED_TTFB_S - 1):+.1f} %)."
        for r in rows
        if (r.profile, r.driven, r.placement) == ("port-167", PORT.name, "shared")
    ]


def ramp(first: int) -> Behaviour:
    """Ours with fixed chunk sizes: from `first` upwards, the last for all that follow."""
    sizes = CHUNK_FRAMES[CHUNK_FRAMES.index(first) :]
    return Behaviour(f"ours, fixed {first}, ...", chunk_frames=sizes)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _prompt(number: int, talk: Conversation) -> Prompt:
    """Its first token id is the request's number."""
    ids = torch.zeros(talk.prompt_rows, dtype=torch.int64)
    ids[0] = number
    talker = TalkerPrompt(
        ids[: talk.talker_rows - ASSISTANT_ROWS], torch.zeros(3, talk.talker_rows)
    )
    mel = torch.zeros(1, round(100 * talk.audio_s))
    return Prompt(ids, torch.zeros(3, talk.prompt_rows), talker, (mel,))


def replay_rows(
    profile: StageProfile,
    placements: Sequence[str],
    behaviours: Sequence[Behaviour],
    concurrency: Sequence[int],
    load: Sequence[Conversation],
) -> list[Row]:
    """The port's way in each placement, one request at a time; then `behaviours` in each, at each
    concurrency."""
    rows = [row(profile, PORT, placement, 1, load) for placement in placements]
    for placement in placements:
        for behaviour in behaviours:
            rows += [row(profile, behaviour, placement, count, load) for count in concurrency]
    return rows


def first_chunk(text: str) -> Behaviour:
    """What --first-chunk says: "adaptive", or a chunk size."""
    if text == "adaptive":
        return OURS
    if text in map(str, CHUNK_FRAMES):
        return ramp(int(text))
    sizes = ", ".join(map(str, CHUNK_FRAMES))
    raise argparse.ArgumentTypeError(f"a first chunk is adaptive, or one of {sizes}; got {text!r}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(sorted(file.stem for file in PROFILES.glob("*.json")))
    parser.add_argument("--profile", default="port-167", help=f"{names}, or a file")
    parser.add_argument("--placement", choices=(*PLACEMENTS, "both"), default="both")
    parser.add_argument(
        "--first-chunk",
        type=lambda text: [first_chunk(part) for part in text.split(",")],
        default="adaptive",
        help="adaptive, or frames, after which chunks grow; several, by commas",
    )
    parser.add_argument(
        "--concurrency",
        type=lambda text: [int(part) for part in text.split(",")],
        default="1",
        help="requests at a time; several, by commas",
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the requests' order")
    parser.add_argument(
        "--driver", action="store_true", help="spend the profile's driver times in ours, too"
    )
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args()
    if options.requests < 1 or min(options.concurrency) < 1:
        parser.error("--requests and --concurrency are 1 or more.")
    file = PROFILES / f"{options.profile}.json"
    try:
        profile = StageProfile.load(file if file.exists() else Path(options.profile))
        behaviours = [
            dataclasses.replace(how, driver=options.driver, name=_name(how, options.driver))
            for how in options.first_chunk
        ]
        placements = list(PLACEMENTS) if options.placement == "both" else [options.placement]
        load = conversations(options.requests, options.seed)
        rows = replay_rows(profile, placements, behaviours, options.concurrency, load)
    except ProfileError as error:
        parser.error(str(error))
    print("\n".join([*table(rows), "", *against_the_port(rows)]))
    if options.json:
        options.first_chunk = [behaviour.name for behaviour in behaviours]
        found = [asdict(row) for row in rows]
        save(results_of("replay", None, options, found, {}), options.json)


def _name(behaviour: Behaviour, driver: bool) -> str:
    return f"{behaviour.name}, with the driver" if driver else behaviour.name


if __name__ == "__main__":
    main()
