"""The times of a spoken question on a trn2, and the cost of every graph, by the cost model.

    python -m bench.trn2.times --model Qwen/Qwen3-Omni-30B-A3B-Instruct --instance trn2.48xlarge

Nothing is measured. A graph's floor is what it reads over the published bandwidth of a core, or
what it computes over the published peak, the longer of the two; sums over the cores are left out.
Its expected time has what a lowering moves besides, the latency of products and sums, and the
host's part of a call: low, likely and high, by what is not published. See bench/trn2/cost.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.trn2.cost import UNPUBLISHED, host_s
from bench.trn2.counts import CountedGraph, cost_table, count_graphs
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.released import open_config
from qwen3_omni_neuron.compilation.loading import find_target
from qwen3_omni_neuron.compilation.plan import (
    MODEL_OF_PART,
    SETTINGS,
    CompilePlan,
    make_plan,
)
from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, Code2WavConfig
from qwen3_omni_neuron.neuron.cores import PHYSICAL_CORES
from qwen3_omni_neuron.neuron.engines import batches
from qwen3_omni_neuron.neuron.graphs.decoders import prompt_size, recent_rows
from qwen3_omni_neuron.neuron.graphs.graph import buffers
from qwen3_omni_neuron.neuron.graphs.memory import core_memory, instances_of, placement, table
from qwen3_omni_neuron.runtime.schedule import AdaptiveSchedule, Pace
from testing.command_line import parser_of, positive, sizes

# The reply whose times are derived: 5 s of speech and the template around it, with the mean text
# and speech that port #167 published for its 100 spoken questions.
SPEECH_S, AUDIO_ROWS, PROMPT_ROWS = 5, 65, 100
TEXT_TOKENS, FRAMES = 68, 200


def _expected_s(bound: str, counted: CountedGraph) -> float:
    return counted.expected_s[bound]


SECONDS: Mapping[str, Callable[[CountedGraph], float]] = {
    **{bound: partial(_expected_s, bound) for bound in UNPUBLISHED},
    "least": lambda counted: counted.floor_s,
}


@dataclass(frozen=True)
class SpeechCalls:
    """Seconds of the calls that speak.

    prefill_s: the talker's prompt, its media projected. step_s, predict_s: a frame of the talker
    and of the code predictor. chunk_s: a chunk of code2wav, by its number of frames. frame_audio_s:
    audio of a frame; latency_s: audio that the first chunk lacks. saved_s: what a step takes less
    in the code predictor's call, after the first chunk.
    """

    prefill_s: float
    step_s: float
    predict_s: float
    chunk_s: Mapping[int, float]
    frame_audio_s: float
    latency_s: float
    saved_s: float = 0.0

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


def calls_of(
    graphs: Sequence[CountedGraph],
    plan: CompilePlan,
    wav: Code2WavConfig | None,
    column: str,
) -> Calls:
    """Return the calls of the question among the graphs of one instance's degrees.

    column: of SECONDS.
    """
    rows, seconds = min(PROMPT_ROWS, plan.context_length - 1), SECONDS[column]

    def call(name: str, **sizes: int) -> float:
        return seconds(_graph(graphs, name, **sizes))

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
        saved_s = 0.0
        if plan.chunked_prefill:
            step = _graph(graphs, "talker_decode", slots=1, window=talker_rows + FRAMES)
            saved_s = saved_in_one_call_s(column, _graph(graphs, "code_predictor", slots=1), step)
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
            saved_s,
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
            now += frame_s - (speech.saved_s if frames > first else 0.0)
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


def times_lines(
    times: Mapping[str, ReplyTimes], plan: CompilePlan, wav: Code2WavConfig | None
) -> Iterator[str]:
    """Yield what the times are of, and a Markdown table of them. times: by column."""
    rows = min(PROMPT_ROWS, plan.context_length - 1)
    reply = f"its reply of {TEXT_TOKENS} text tokens"
    if wav is not None:
        reply += f" and {FRAMES} frames ({FRAMES * wav.frame_samples // SAMPLE_RATE} s of speech; "
        reply += "RTF: time to the last sample by their duration)"
    yield (
        f"Derived from the costs of the graphs, not measured: a spoken question of {SPEECH_S} s "
        f"alone ({rows} prompt rows, none of them computed before) and {reply}."
    )
    yield ""
    figures: dict[str, Callable[[ReplyTimes], str]] = {
        "first token (TTFT), ms": lambda t: _ms(t.ttft_s),
        "first sound (TTFB), ms": lambda t: _ms(t.ttfb_s),
        "RTF": lambda t: "" if t.rtf is None else f"{t.rtf:.3f}",
        **{
            f"{part}, ms a {'token' if part == 'thinker' else 'frame'}": partial(_part_ms, part)
            for part in next(iter(times.values())).parts_s
        },
        "what limits": lambda t: t.limit,
    }
    cells = [[name, *map(of, times.values())] for name, of in figures.items()]
    yield from table(["", *times], [row for row in cells if any(row[1:])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the times of a plan's reply where it fits, and the costs of its graphs."""
    parser = parser_of("trn2.times", __doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-Omni-30B-A3B-Instruct", metavar="DIR_OR_ID")
    parser.add_argument("--target", choices=("torchneuron", "neuron"), default="torchneuron")
    text = "default: a small one and a large one, with their degrees; with --tp the smallest"
    parser.add_argument("--instance", choices=list(PHYSICAL_CORES), help=text)
    for name, setting in SETTINGS.items():
        if name != "target":
            kinds: dict[Any, Callable[[str], Any]] = {int: positive, tuple[int, ...]: sizes}
            kind, text = kinds.get(setting.type, str), setting.help
            parser.add_argument(setting.flag, type=kind, dest=name, help=text)
    options = vars(parser.parse_args(arguments))
    limits, instance = find_target(options.pop("target")).limits, options.pop("instance")
    with open_config(options.pop("model")) as folder:
        config = read_config(folder)
        plan = make_plan(folder, config, limits, instance, **options)
    each_default = instance is None and options["tp"] is None
    instances = instances_of(plan, instance, limits.tp if each_default else None)
    memory = core_memory(config, plan, list(instances.values()))
    counted = count_graphs(config, plan, list(instances.values()))
    times: dict[str, ReplyTimes] = {}
    for name, tp in instances.items():
        placed, reason = placement(memory, tp, name)
        print(f"{name}, TP {tp}: {placed or 'does not fit'}. {reason}\n")
        graphs = [each for each in counted if each.tp == tp.of(MODEL_OF_PART[each.graph.part])]
        for column in SECONDS if placed else ():
            calls = calls_of(graphs, plan, config.code2wav, column)
            times[f"{name}: {column}"] = reply_times(calls, placed == "shared")
    if times:
        print("\n".join(times_lines(times, plan, config.code2wav)) + "\n")
    print(cost_table(counted))


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


def saved_in_one_call_s(bound: str, predictor: CountedGraph, step: CountedGraph) -> float:
    """Return the host's time that the talker's step saves in the code predictor's call.

    bound: of SECONDS; a floor has no host's time.
    """
    if bound not in UNPUBLISHED:
        return 0.0
    costs = predictor.cost, step.cost
    apart_s = sum(host_s(bound, cost.inputs, cost.copies) for cost in costs)
    copies = buffers(predictor.graph.inputs) + buffers(step.graph.outputs)
    return apart_s - host_s(bound, sum(cost.inputs for cost in costs), copies, starts=2)


def _graph(graphs: Sequence[CountedGraph], name: str, **sizes: int) -> CountedGraph:
    """Return the smallest graph of these sizes or more, or else the largest."""
    named = [counted for counted in graphs if counted.graph.name == name]
    named.sort(key=lambda counted: [counted.graph.size(axis) for axis in sizes])
    enough = (p for p in named if all(p.graph.size(axis) >= n for axis, n in sizes.items()))
    return next(enough, named[-1])


def _prefill_s(
    graphs: Sequence[CountedGraph],
    seconds: Callable[[CountedGraph], float],
    name: str,
    rows: int,
) -> float:
    """Return the time of a prompt's calls, as neuron.slots chooses their graphs.

    rows: number of the prompt's rows; those beyond the longest window are not counted.
    """
    named: dict[tuple[int, ...], CountedGraph] = {
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


if __name__ == "__main__":
    main()
