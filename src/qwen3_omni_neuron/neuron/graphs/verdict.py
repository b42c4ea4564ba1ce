"""The verdict of a dry run: whether a plan fits an instance, and the times of a spoken question.

Everything is derived from the counts of neuron.graphs.dry_run; nothing is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART, CompilePlan, cores_of_stages
from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, Code2WavConfig
from qwen3_omni_neuron.neuron.cores import PHYSICAL_CORES
from qwen3_omni_neuron.neuron.engines.encoders import batches
from qwen3_omni_neuron.neuron.graphs.decoders import prompt_size, recent_rows
from qwen3_omni_neuron.neuron.graphs.dry_run import (
    CoreMemory,
    DryRun,
    PlannedGraph,
    does_not_fit,
    table,
)
from qwen3_omni_neuron.runtime.schedule import AdaptiveSchedule, Pace

# The reply whose times are derived: 5 s of speech and the template around it, with the mean text
# and speech that port #167 published for its 100 spoken questions.
SPEECH_S, AUDIO_ROWS, PROMPT_ROWS = 5, 65, 100
TEXT_TOKENS, FRAMES = 68, 200
INSTANCES = ("trn2.3xlarge", "trn2.48xlarge")  # the smaller one first
_ON_TOP = "NEFFs and scratch come on top."
SECONDS: Mapping[str, Callable[[PlannedGraph], float]] = {
    "expected": lambda planned: planned.expected_s,
    "least": lambda planned: planned.floor_s,
}


@dataclass(frozen=True)
class SpeechCalls:
    """Seconds of the calls that speak.

    prefill_s: the talker's prompt, its media projected. step_s, predict_s: a frame of the talker
    and of the code predictor. chunk_s: a chunk of code2wav, by its number of frames. frame_audio_s:
    audio of a frame; latency_s: audio that the first chunk lacks.
    """

    prefill_s: float
    step_s: float
    predict_s: float
    chunk_s: Mapping[int, float]
    frame_audio_s: float
    latency_s: float

    @property
    def vocoder_frame_s(self) -> float:
        """Time of code2wav for a frame of its largest chunk, the usual one after the first."""
        frames = max(self.chunk_s)
        return self.chunk_s[frames] / frames


@dataclass(frozen=True)
class Calls:
    """Seconds of the calls that answer one spoken question alone.

    encode_s: the audio encoder. prefill_s: the thinker's prompt, whose logits give the first token.
    token_s: a step, which gives each further token. speech: None without a talker.
    """

    encode_s: float
    prefill_s: float
    token_s: float
    speech: SpeechCalls | None


@dataclass(frozen=True)
class ReplyTimes:
    """Times of a reply.

    ttft_s: from the question's end to the first token; ttfb_s: to the first sample. rtf: time to
    the last sample by the duration of the speech; both None without speech. parts_s: seconds a
    token or a frame of each part. limit: the part that takes longest over the reply, in the stage
    that takes longest.
    """

    ttft_s: float
    ttfb_s: float | None
    rtf: float | None
    parts_s: Mapping[str, float]
    limit: str


@dataclass(frozen=True)
class Verdict:
    """Answer whether a plan fits.

    placement: "split", or "shared" where only that fits, or None where neither does. reason: a
    sentence with the memory of a core, or what is too large and what to change. times: by the kinds
    of SECONDS; empty where the plan does not fit.
    """

    instance: str
    tp: Degrees
    placement: str | None
    reason: str
    times: Mapping[str, ReplyTimes]


def instances_of(
    plan: CompilePlan, instance: str | None, defaults: Mapping[str, Degrees] | None = None
) -> dict[str, Degrees]:
    """Return the instances to judge a plan on, with the degrees of each.

    instance: one of neuron.cores.PHYSICAL_CORES, or None for the smallest with the cores that the
    plan's degrees need. defaults: degrees by instance; if given, each of INSTANCES has its own.
    """
    if defaults is not None:
        return {name: defaults[name] for name in INSTANCES}
    enough = (name for name in INSTANCES if _cores(name, plan.lnc) >= plan.tp.each[-1])
    return {instance or next(enough): plan.tp}


def make_verdict(run: DryRun, tp: Degrees, instance: str, wav: Code2WavConfig | None) -> Verdict:
    """Judge a plan at some degrees on an instance. wav: None for a checkpoint without a talker.

    instance: one of neuron.cores.PHYSICAL_CORES.
    """
    placement, reason = _placement(run, tp, instance)
    graphs = [p for p in run.graphs if p.tp == tp.of(MODEL_OF_PART[p.graph.part])]
    times = {}
    if placement is not None and graphs:
        shared = placement == "shared"
        for kind, seconds in SECONDS.items():
            times[kind] = reply_times(calls_of(graphs, run.plan, wav, seconds), shared)
    return Verdict(instance, tp, placement, reason, times)


def calls_of(
    graphs: Sequence[PlannedGraph],
    plan: CompilePlan,
    wav: Code2WavConfig | None,
    seconds: Callable[[PlannedGraph], float],
) -> Calls:
    """Return the calls of the question among the graphs of one instance's degrees."""
    rows = min(PROMPT_ROWS, plan.context_length - 1)
    call = partial(_seconds, graphs, seconds)
    prefill_s = partial(_prefill_s, graphs, seconds)

    def step_s(part: str, window: int) -> float:
        """Return the time of a step, with its part of moving the recent rows of the KV cache."""
        decode_s = call(f"{part}_decode", slots=1, window=window)
        if not plan.chunked_prefill:  # NxDI's decoders write to the cache itself
            return decode_s
        return decode_s + call(f"{part}_flush", window=window) / recent_rows(plan)

    speech = None
    if wav is not None:
        talker_rows = min(rows + ASSISTANT_ROWS, plan.talker_context_length - 1)
        speech = SpeechCalls(
            sum(
                call("hidden_projection", rows=size)
                for _, size in batches(AUDIO_ROWS, plan.projection_rows)
            )
            + prefill_s("talker_prefill", talker_rows),
            step_s("talker", talker_rows + FRAMES),
            call("code_predictor", slots=1),
            {n: call("code2wav", streams=1, frames=n) for n in plan.chunk_frames},
            wav.frame_samples / SAMPLE_RATE,
            wav.latency_samples / SAMPLE_RATE,
        )
    return Calls(
        call("audio_encoder", windows=1),
        prefill_s("thinker_prefill", rows),
        step_s("thinker", rows + TEXT_TOKENS),
        speech,
    )


def reply_times(calls: Calls, shared: bool) -> ReplyTimes:
    """Return the times of the reply, as the stages run it. shared: all of them on the same cores.

    Split, the thinker writes and the vocoder decodes while the talker speaks. Shared, each call
    waits for the one before: a frame for its token, the first chunk for its last frame, and of
    later chunks each frame bears its part. Where code2wav is slower than the talker, the schedule
    may take a larger first chunk than is counted here.
    """
    ttft_s, speech = calls.encode_s + calls.prefill_s, calls.speech
    if speech is None:
        return ReplyTimes(ttft_s, None, None, {"thinker": calls.token_s}, "thinker")
    frame_s, vocoder_s = speech.step_s + speech.predict_s, speech.vocoder_frame_s
    paced_s = calls.token_s + frame_s if shared else max(calls.token_s, frame_s)
    first = _first_chunk(speech, paced_s)
    now = ttft_s + speech.prefill_s + speech.predict_s  # the first frame
    ttfb_s = 0.0
    for frames in range(1, FRAMES + 1):
        if frames > 1:
            token_s = calls.token_s if frames <= TEXT_TOKENS else 0.0
            if shared:
                now += token_s
            elif token_s:
                now = max(now, ttft_s + (frames - 1) * token_s)
            now += frame_s
        if frames == first:
            ttfb_s = now + speech.chunk_s[first]
        if shared and frames >= first:
            now += vocoder_s if frames > first else speech.chunk_s[first]
    if not shared:  # the last chunk is decoded when all frames are there
        decoded_s = ttfb_s + (FRAMES - first) * vocoder_s
        now = max(now + speech.chunk_s[max(speech.chunk_s)], decoded_s)
    parts_s = {
        "thinker": calls.token_s,
        "talker": speech.step_s,
        "code predictor": speech.predict_s,
        "code2wav": vocoder_s,
    }
    audio_s = FRAMES * speech.frame_audio_s - speech.latency_s
    return ReplyTimes(ttft_s, ttfb_s, now / audio_s, parts_s, _limit(parts_s, shared))


def verdict_lines(
    run: DryRun, verdicts: Sequence[Verdict], wav: Code2WavConfig | None
) -> Iterator[str]:
    """Yield what the verdicts say: a line for each, and a Markdown table of their times."""
    for verdict in verdicts:
        fits = "does not fit" if verdict.placement is None else f"fits, {verdict.placement}"
        yield f"{verdict.instance}, TP {verdict.tp}: {fits}. {verdict.reason}"
        yield ""
    timed = [(v, kind, times) for v in verdicts for kind, times in v.times.items()]
    if not timed:
        return
    rows = min(PROMPT_ROWS, run.plan.context_length - 1)
    reply = f"its reply of {TEXT_TOKENS} text tokens"
    if wav is not None:
        reply += f" and {FRAMES} frames ({FRAMES * wav.frame_samples // SAMPLE_RATE} s of speech; "
        reply += "RTF: time to the last sample by their duration)"
    yield (
        f"Derived from the tables below, not measured: a spoken question of {SPEECH_S} s alone "
        f"({rows} prompt rows, none of them computed before) and {reply}."
    )
    yield ""
    figures: dict[str, Callable[[ReplyTimes], str]] = {
        "first token (TTFT), ms": lambda t: _ms(t.ttft_s),
        "first sound (TTFB), ms": lambda t: _ms(t.ttfb_s),
        "RTF": lambda t: "" if t.rtf is None else f"{t.rtf:.3f}",
        **{
            f"{part}, ms a {'token' if part == 'thinker' else 'frame'}": partial(_part_ms, part)
            for part in timed[0][2].parts_s
        },
        "what limits": lambda t: t.limit,
    }
    head = [f"{v.instance}: {kind}" for v, kind, _ in timed]
    cells = [[name, *(of(times) for _, _, times in timed)] for name, of in figures.items()]
    yield from table(["", *head], [row for row in cells if any(row[1:])])
    yield ""


def _placement(run: CoreMemory, tp: Degrees, instance: str) -> tuple[str | None, str]:
    """Return the placement that fits, and the sentence about it: see Verdict."""
    cores, memory = _cores(instance, run.plan.lnc), run.chip.core_bytes
    stages = {stage: nbytes for stage, nbytes in run.stage_bytes(tp).items() if nbytes}
    needed = cores_of_stages(tp, stages)
    most, total = max(needed.values()), sum(needed.values())
    if most > cores:
        return (
            None,
            f"It has {cores} logical cores at LNC {run.plan.lnc}, and TP {tp} needs {most}.",
        )
    shared, fullest = run.core_bytes(tp), max(stages, key=lambda stage: stages[stage])
    said = f"{shared / 1e9:.2f} of {memory / 1e9:.1f} GB on the first of {most} cores"
    if len(stages) > 1 and total <= cores and stages[fullest] <= memory:
        each = " + ".join(map(str, needed.values()))
        return "split", (
            f"{stages[fullest] / 1e9:.2f} of {memory / 1e9:.1f} GB on the first core of the "
            f"{fullest}, the fullest of {each} cores; shared: {said}. {_ON_TOP}"
        )
    if shared <= memory:
        return "shared", f"{said}. {_ON_TOP}"
    return None, does_not_fit(run, tp, cores)


def _cores(instance: str, lnc: int) -> int:
    """Return the number of logical cores."""
    return PHYSICAL_CORES[instance] // lnc


def _first_chunk(speech: SpeechCalls, frame_s: float) -> int:
    """Return the frames of the first chunk, once the pace of frames and calls is known."""
    schedule = AdaptiveSchedule(sorted(speech.chunk_s), speech.frame_audio_s, speech.latency_s)
    return schedule.next_frames(Pace(1, None, frame_s, 0.0, speech.chunk_s))


def _limit(parts_s: Mapping[str, float], shared: bool) -> str:
    """Return the part that takes longest over a reply in the slowest stage; shared: of all parts.

    parts_s: see ReplyTimes.
    """
    counts = {part: TEXT_TOKENS if part == "thinker" else FRAMES for part in parts_s}
    reply_s = {part: counts[part] * seconds for part, seconds in parts_s.items()}
    split = [["thinker"], ["talker", "code predictor"], ["code2wav"]]
    stages = [list(parts_s)] if shared else split
    slowest = max(stages, key=lambda parts: sum(reply_s[part] for part in parts))
    return max(slowest, key=lambda part: reply_s[part])


def _seconds(
    graphs: Sequence[PlannedGraph],
    seconds: Callable[[PlannedGraph], float],
    name: str,
    **sizes: int,
) -> float:
    """Return the time of the smallest graph of these sizes or more, or else of the largest."""
    named = [planned for planned in graphs if planned.graph.name == name]
    named.sort(key=lambda planned: [planned.graph.size(axis) for axis in sizes])
    enough = (p for p in named if all(p.graph.size(axis) >= n for axis, n in sizes.items()))
    return seconds(next(enough, named[-1]))


def _prefill_s(
    graphs: Sequence[PlannedGraph],
    seconds: Callable[[PlannedGraph], float],
    name: str,
    rows: int,
) -> float:
    """Return the time of a prompt's calls, as neuron.engines.decoder chooses their graphs.

    rows: number of the prompt's rows; those beyond the longest window are not counted.
    """
    named: dict[tuple[int, ...], PlannedGraph] = {
        (p.graph.size("window"), p.graph.size("rows")): p for p in graphs if p.graph.name == name
    }
    sizes = sorted(named)
    rows, begin, total_s = min(rows, sizes[-1][0]), 0, 0.0
    while begin < rows:
        size = prompt_size(sizes, begin, rows - begin)
        total_s += seconds(named[size])
        begin += size[1]
    return total_s


def _part_ms(part: str, times: ReplyTimes) -> str:
    return _ms(times.parts_s[part])


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
