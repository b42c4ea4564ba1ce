"""The verdict of a dry run: what fits, and times that follow from its table."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import MODELS, CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs import dry_run as dry_run_module
from qwen3_omni_neuron.neuron.graphs import weights
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.graphs.cost import TRN2, Cost, CountingGroup, graph_cost
from qwen3_omni_neuron.neuron.graphs.dry_run import (
    CoreMemory,
    DryRun,
    PlannedGraph,
    core_memory,
    dry_run,
    dry_run_text,
)
from qwen3_omni_neuron.neuron.graphs.verdict import (
    FRAMES,
    PROMPT_ROWS,
    SPEECH_S,
    TEXT_TOKENS,
    Calls,
    SpeechCalls,
    calls_of,
    instances_of,
    make_verdict,
    reply_times,
    verdict_lines,
)
from qwen3_omni_neuron.neuron.torchneuron.target import TORCHNEURON
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED
from testing.replaying.cases import OURS
from testing.replaying.load import RequestLengths
from testing.replaying.profiles import STAGES, StageLatency, StageProfile
from testing.replaying.simulation import replay
from testing.torchneuron.leaner import write_leaner_checkpoint

TWO, FOUR, EIGHT = map(Degrees.same, (2, 4, 8))
PLAN = replace(
    TINY_PLAN,
    dtype="bfloat16",
    tp=EIGHT,
    max_concurrency=8,
    context_length=8192,
    talker_context_length=12297,
    prompt_buckets=(64, 128, 512, 8192),
    decode_buckets=(256, 512, 8192, 12297),
    audio_windows=(1, 4),
    projection_rows=(64, 512),
    batches=(1, 8),
    chunk_frames=(1, 2, 4, 25),
    chunked_prefill=True,
)
SMALL, LARGE = "trn2.3xlarge", "trn2.48xlarge"
DEFAULTS = TORCHNEURON.limits.tp


# The times of a reply, against the package's own schedule on a virtual clock


def calls(token_s: float, step_s: float, predict_s: float, vocoder_s: float) -> Calls:
    """Calls whose chunks take 3 ms and vocoder_s a frame."""
    chunk_s = {n: 0.003 + n * vocoder_s for n in (1, 2, 4, 8, 16, 25)}
    speech = SpeechCalls(0.012, step_s, predict_s, chunk_s, 0.08, 555 / 24000)
    return Calls(0.007, 0.021, token_s, speech)


@pytest.mark.parametrize("placement", ["shared", "split"])
@pytest.mark.parametrize(
    "made",
    [
        calls(0.004, 0.003, 0.005, 0.0004),
        calls(0.030, 0.003, 0.005, 0.0004),  # a token takes longer than a frame
        calls(0.004, 0.012, 0.030, 0.0004),  # frames so slow that the first chunk has two
        calls(0.004, 0.003, 0.005, 0.0120),  # a chunk takes longer than its frames
    ],
    ids=["usual", "thinker", "talker", "vocoder"],
)
def test_times_are_those_of_the_packages_schedule(made: Calls, placement: str) -> None:
    """The third of three questions: by then the pace of frames and calls is known."""
    speech = made.speech
    assert speech is not None
    seconds: dict[str, dict[int, float]] = {
        "encoders": {1: made.encode_s},
        "thinker_prefill": {PROMPT_ROWS: made.prefill_s},
        "thinker_decode": {1: made.token_s},
        "talker_prefill": {PROMPT_ROWS: speech.prefill_s},
        "talker_step": {1: speech.step_s},
        "code_predictor": {1: speech.predict_s},
        "code2wav_start": dict(speech.chunk_s),
        "code2wav_step": dict(speech.chunk_s),
    }
    stages = {
        name: StageLatency(name, "line", tuple(seconds.get(name, {0: 0.0}).items()), "made up")
        for name in STAGES
    }
    question = RequestLengths(PROMPT_ROWS, PROMPT_ROWS, SPEECH_S, TEXT_TOKENS, FRAMES)
    profile = StageProfile("made up", "made up", stages)
    replied = replay(profile, OURS, placement, 1, [question] * 3).replies[-1].result.timings
    times = reply_times(made, placement == "shared")
    assert times.ttft_s == pytest.approx(replied.ttft_s)
    slow_vocoder = speech.vocoder_frame_s > speech.step_s + speech.predict_s
    if not slow_vocoder:
        assert times.ttfb_s == pytest.approx(replied.ttfb_s)
    assert times.rtf == pytest.approx(replied.rtf, rel=0.08 if slow_vocoder else 0.03)


@pytest.mark.parametrize(
    ("made", "shared", "split"),
    [
        (calls(0.004, 0.003, 0.005, 0.0004), "code predictor", "code predictor"),
        (calls(0.020, 0.003, 0.005, 0.0004), "thinker", "code predictor"),
        (calls(0.030, 0.003, 0.005, 0.0004), "thinker", "thinker"),
        (calls(0.004, 0.009, 0.005, 0.0120), "code2wav", "talker"),
        (calls(0.004, 0.006, 0.005, 0.0120), "code2wav", "code2wav"),
    ],
)
def test_the_part_that_limits_is_in_the_slowest_stage(made: Calls, shared: str, split: str) -> None:
    """68 tokens and 200 frames: split, talker and code predictor are one stage."""
    assert (reply_times(made, True).limit, reply_times(made, False).limit) == (shared, split)


# The calls of the question, and the numbers of a table


def numbered(config: OmniConfig, plan: CompilePlan) -> list[PlannedGraph]:
    """All graphs of a plan; the floor of each is its number."""
    return [
        PlannedGraph(graph, plan.degree(graph.part), Cost(0, 0, 0), float(number), 0.0)
        for number, graph in enumerate(all_graphs(config, plan))
    ]


def test_a_question_takes_the_smallest_graphs_that_hold_it() -> None:
    """100 rows, 109 of the talker; 65 of audio; positions for the reply behind them."""
    graphs = numbered(RELEASED, PLAN)
    at = {planned.graph.label: planned.floor_s for planned in graphs}
    found = calls_of(graphs, PLAN, RELEASED.code2wav, lambda planned: planned.floor_s)
    assert found == Calls(
        at["audio_encoder[windows=1]"],
        at["thinker_prefill[rows=128,window=256]"],
        at["thinker_decode[slots=1,window=256]"] + at["thinker_flush[window=256]"] / 32,
        SpeechCalls(
            at["hidden_projection[rows=512]"] + at["talker_prefill[rows=128,window=256]"],
            at["talker_decode[slots=1,window=512]"] + at["talker_flush[window=512]"] / 32,
            at["code_predictor[slots=8,top_k=50]"],
            {n: at[f"code2wav[streams=1,frames={n}]"] for n in PLAN.chunk_frames},
            0.08,
            555 / 24000,
        ),
    )


def test_a_long_prompt_is_several_calls_as_the_engine_makes_them() -> None:
    """100 rows and 109: a call of 64 rows, and one of the smallest graph with the others."""
    plan = replace(
        PLAN, prompt_buckets=(40, 64), decode_buckets=(80, 8192), projection_rows=(8, 60)
    )
    graphs = numbered(RELEASED, plan)
    at = {planned.graph.label: planned.floor_s for planned in graphs}
    found = calls_of(graphs, plan, RELEASED.code2wav, lambda planned: planned.floor_s)
    first, then = (f"_prefill[rows={size}]" for size in ("64,window=80", "40,window=8192"))
    assert found.prefill_s == at[f"thinker{first}"] + at[f"thinker{then}"]
    assert found.speech is not None
    assert found.speech.prefill_s == (
        at["hidden_projection[rows=60]"]
        + at["hidden_projection[rows=8]"]
        + at[f"talker{first}"]
        + at["talker_prefill[rows=64,window=12297]"]
    )


def test_a_checkpoint_without_a_talker_has_the_times_of_its_text() -> None:
    config = replace(RELEASED, talker=None, code2wav=None)
    graphs = numbered(config, PLAN)
    times = reply_times(calls_of(graphs, PLAN, None, lambda planned: planned.floor_s), False)
    assert (times.ttfb_s, times.rtf, times.limit) == (None, None, "thinker")
    assert list(times.parts_s) == ["thinker"]


@pytest.fixture(scope="module")
def leaner(tmp_path_factory: pytest.TempPathFactory) -> OmniConfig:
    return read_config(write_leaner_checkpoint(tmp_path_factory.mktemp("leaner")))


def columns(text: str, first: str) -> dict[str, list[str]]:
    """Cells of the table whose head begins so, by the first cell of each row."""
    lines = text[text.index(first) :].split("\n\n", maxsplit=1)[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_every_number_follows_from_the_rows_of_the_table(leaner: OmniConfig) -> None:
    """By hand: shared, all calls one after the other; here a frame has 0.25 ms of audio, so that
    the first chunk is the largest.
    """
    plan = replace(PLAN, dtype="float32", max_concurrency=1, batches=(1,), prompt_buckets=(128,),
                   context_length=256, talker_context_length=512, decode_buckets=(256,),
                   chunk_frames=(1, 2), patch_buckets=(64,), audio_windows=(1,),
                   projection_rows=(512,))  # fmt: skip
    # Slow enough that the tables' digits tell the small graphs apart.
    slow = {"bytes_per_s": TRN2.bytes_per_s / 1e4, "flops_per_s": TRN2.flops_per_s / 1e4}
    run = dry_run(leaner, plan, (TWO,), replace(TRN2, **slow))
    verdict = make_verdict(run, TWO, SMALL, leaner.code2wav)
    text = "\n".join([*verdict_lines(run, [verdict], leaner.code2wav), dry_run_text(run)])
    said, rows = columns(text, "|  |"), columns(text, "| graph |")
    assert said[""] == [f"{SMALL}: expected", f"{SMALL}: least"]
    for column, head in enumerate(("expected ms", "floor ms")):
        of = rows["graph"].index(head)

        def ms(label: str, of: int = of) -> float:
            return float(rows[label][of])

        token = ms("thinker_decode[slots=1,window=256]") + ms("thinker_flush[window=256]") / 32
        step = ms("talker_decode[slots=1,window=512]") + ms("talker_flush[window=512]") / 32
        predictor = ms("code_predictor[slots=1,top_k=50]")
        vocoder = ms("code2wav[streams=1,frames=2]") / 2
        ttft = ms("audio_encoder[windows=1]") + ms("thinker_prefill[rows=128,window=256]")
        ttfb = ttft + ms("hidden_projection[rows=512]") + ms("talker_prefill[rows=128,window=512]")
        ttfb += predictor + (token + step + predictor)
        ttfb += 2 * vocoder
        total = ttfb + 66 * token + 198 * (step + predictor + vocoder)
        wav = leaner.code2wav
        audio = (200 * wav.frame_samples - wav.latency_samples) / 24000 * 1e3
        expected = {
            "first token (TTFT), ms": ttft,
            "first sound (TTFB), ms": ttfb,
            "RTF": total / audio,
            "thinker, ms a token": token,
            "talker, ms a frame": step,
            "code predictor, ms a frame": predictor,
            "code2wav, ms a frame": vocoder,
        }
        for name, value in expected.items():
            assert float(said[name][column]) == pytest.approx(value, rel=1e-3, abs=0.01), name
        totals = {
            "thinker": 68 * token,
            "talker": 200 * step,
            "code predictor": 200 * predictor,
            "code2wav": 200 * vocoder,
        }
        assert said["what limits"][column] == max(totals, key=lambda part: totals[part])


# Layers are counted once


def test_layers_that_repeat_are_counted_once_and_exactly(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6 layers of every part: the same cost as of all of them, from 5 at most.

    Heads are as wide as the released ones.
    """
    plan = replace(TINY_PLAN, prompt_buckets=(12,), decode_buckets=(64,), patch_buckets=(64,),
                   audio_windows=(1,), batches=(3,), chunk_frames=(4,))  # fmt: skip
    thinker, talker = config.thinker, config.talker
    heads = {"head_dim": 128, "rope": RELEASED.thinker.text.rope}
    assert talker is not None and config.code2wav is not None
    deep = replace(
        config,
        thinker=replace(
            thinker,
            text=replace(thinker.text, layers=6, **heads),
            audio=replace(thinker.audio, layers=6),
            vision=replace(thinker.vision, layers=6, deepstack_layers=(1, 3, 5)),
        ),
        talker=replace(
            talker,
            text=replace(talker.text, layers=6, **heads),
            predictor=replace(talker.predictor, layers=6),
            accept_hidden_layer=4,
        ),
        code2wav=replace(config.code2wav, layers=6),
    )
    tp = Degrees(thinker=2, talker=1, predictor=1, vocoder=2, encoders=1)
    rank, groups = dry_run_module._rank(deep, replace(plan, tp=tp))
    depths: set[int] = set()

    def counted(graph: object, owner: object, group: CountingGroup) -> Cost:
        depths.update(len(m.layers) for m in owner.modules() if hasattr(m, "layers"))  # type: ignore[attr-defined]
        return graph_cost(graph, owner, group)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run_module, "graph_cost", counted)
    monkeypatch.setattr(weights, "SMALL", 2**8)
    monkeypatch.setattr(weights, "MOST_ELEMENTS", 2**14)  # so that some layers fill a tensor
    run = dry_run(deep, plan, (tp,))
    assert max(depths) == 5
    for planned in run.graphs:
        part = planned.graph.part
        assert planned.tp == replace(plan, tp=tp).degree(part)
        whole = graph_cost(planned.graph, getattr(rank, part), groups[part])
        for field in fields(Cost):
            ours, theirs = getattr(planned.cost, field.name), getattr(whole, field.name)
            if isinstance(theirs, tuple):
                ours, theirs = sorted(map(str, ours)), sorted(map(str, theirs))
            elif isinstance(theirs, float):
                theirs = pytest.approx(theirs)
            assert ours == theirs, (planned.graph.label, field.name)


# What fits


@pytest.fixture(scope="module")
def memory() -> CoreMemory:
    return core_memory(RELEASED, PLAN, (FOUR, EIGHT, *DEFAULTS.values()))


def judged(memory: CoreMemory, tp: Degrees, instance: str) -> tuple[str | None, str]:
    verdict = make_verdict(DryRun(**vars(memory), graphs=[]), tp, instance, RELEASED.code2wav)
    return verdict.placement, verdict.reason


def test_the_placement_is_split_where_the_instance_has_the_cores(memory: CoreMemory) -> None:
    def shared(tp: Degrees) -> str:
        return f"{memory.core_bytes(tp) / 1e9:.2f} of 25.8 GB on the first of {tp.each[-1]} cores"

    for small in (FOUR, DEFAULTS[SMALL]):
        assert judged(memory, small, SMALL) == (
            "shared",
            f"{shared(small)}. NEFFs and scratch come on top.",
        )
    for large, cores in ((EIGHT, "8 + 8 + 8"), (DEFAULTS[LARGE], "8 + 8 + 1")):
        thinker = memory.stage_bytes(large)["thinker"] / 1e9
        assert judged(memory, large, LARGE) == (
            "split",
            f"{thinker:.2f} of 25.8 GB on the first core of the thinker, the fullest of {cores} "
            f"cores; shared: {shared(large)}. NEFFs and scratch come on top.",
        )
    assert judged(memory, DEFAULTS[LARGE], SMALL) == (
        None,
        "It has 4 logical cores at LNC 2, and TP "
        "thinker=8,talker=8,predictor=1,vocoder=1,encoders=8 needs 8.",
    )


def test_stages_of_fewer_cores_are_split_where_all_of_them_are_there(memory: CoreMemory) -> None:
    """On 4 cores, 2 and 1 and 1; where the thinker has 4 of them, none is left."""
    chip = replace(memory.chip, memory_bytes=2 * memory.chip.memory_bytes)
    tp = Degrees(thinker=2, talker=1, predictor=1, vocoder=1, encoders=2)
    few = core_memory(RELEASED, PLAN, (tp, replace(tp, thinker=4)), chip)
    placement, reason = judged(few, tp, SMALL)
    assert placement == "split"
    assert "the fullest of 2 + 1 + 1 cores; shared: " in reason
    assert judged(few, replace(tp, thinker=4), SMALL)[0] == "shared"


def test_what_does_not_fit_is_told_what_the_instance_allows() -> None:
    """The large one has more cores; the small one neither these nor another placement."""
    small = DEFAULTS[SMALL]
    full = core_memory(RELEASED, replace(PLAN, max_concurrency=32), (FOUR, small))
    assert judged(full, FOUR, LARGE)[0] == judged(full, small, LARGE)[0] == "split"
    placement, reason = judged(full, FOUR, SMALL)
    assert placement is None
    assert "25.8 GB a core, and there are no cores to split the stages over." in reason
    assert "Change one or more of: fewer slots or a shorter context length" in reason
    assert "Change one or more of: fewer slots" in judged(full, small, SMALL)[1]
    run = DryRun(**vars(full), graphs=[])
    verdict = make_verdict(run, FOUR, SMALL, RELEASED.code2wav)
    lines = list(verdict_lines(run, [verdict], RELEASED.code2wav))
    assert lines == [f"{SMALL}, TP 4: does not fit. {reason}", ""]
    half = core_memory(RELEASED, replace(PLAN, lnc=1), (EIGHT,))
    assert judged(half, EIGHT, SMALL)[0] == "shared"


@pytest.mark.parametrize(
    ("instance", "tp", "lnc", "found"),
    [
        (None, TWO, 2, SMALL),
        (None, FOUR, 2, SMALL),
        (None, EIGHT, 2, LARGE),
        (None, EIGHT, 1, SMALL),
        (None, DEFAULTS[SMALL], 2, SMALL),
        (None, DEFAULTS[LARGE], 2, LARGE),
        (SMALL, EIGHT, 2, SMALL),
        ("trn2u.48xlarge", FOUR, 2, "trn2u.48xlarge"),
    ],
)
def test_a_plan_is_judged_on_the_instance_or_the_smallest_with_the_cores(
    instance: str | None, tp: Degrees, lnc: int, found: str
) -> None:
    assert instances_of(replace(PLAN, tp=tp, lnc=lnc), instance) == {found: tp}


def test_each_instance_has_its_default_degrees() -> None:
    found = instances_of(PLAN, None, DEFAULTS)
    assert found == {SMALL: DEFAULTS[SMALL], LARGE: DEFAULTS[LARGE]}


# The command


def test_a_dry_run_says_its_verdict_first_and_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_leaner_checkpoint(tmp_path)
    words = ["compile", "--model", str(folder), "--dry-run", "--instance", SMALL, "--tp", "4"]
    words += ["--buckets", "64"]
    words += ["--decode-buckets", "64", "--context-length", "64", "--max-concurrency", "1"]
    words += ["--patch-buckets", "64", "--audio-windows", "1", "--chunk-frames", "1"]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{SMALL}, TP 4: fits, shared. 0.0")
    assert "(63 prompt rows, none of them computed before)" in printed.out
    assert printed.out.index("| what limits |") < printed.out.index("| part |")
    shown = printed.err.splitlines()
    assert len(shown) == len(MODELS)
    assert shown[2].startswith("TP 4, thinker: 3 graphs in ")
    assert all(" in " in line and line.endswith(" s") for line in shown)
    assert "|" not in printed.err, "no bar beside a terminal"


def test_a_released_checkpoint_is_judged_from_its_hub_id(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph of each kind; without the hub and without the time of the others."""
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    words = ["compile", "--model", "Qwen/Qwen3-Omni-30B-A3B-Captioner", "--dry-run", "--tp", "4"]
    words += ["--target", "neuron", "--buckets", "512", "--context-length", "512"]
    words += ["--decode-buckets", "512", "--max-concurrency", "1"]
    words += ["--patch-buckets", "64", "--audio-windows", "1"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{SMALL}, TP 4: fits, shared. ")
    assert "31.7 B parameters" in printed
    assert "| first token (TTFT), ms |" in printed
    assert "RTF |" not in printed
