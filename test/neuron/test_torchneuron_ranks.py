"""Target torchneuron over two and four ranks, real processes over gloo, shared and split."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.compilation.loading import load_engines
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.errors import CompileError, EngineDiedError
from qwen3_omni_neuron.neuron.torchneuron.build import ModelRanks
from qwen3_omni_neuron.neuron.torchneuron.environment import CACHES
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import CASES, assistant, text, user
from testing.recorded_calls import Calls, ungated, watching
from testing.repeats import again
from testing.replies import GREEDY, assert_same, reply_to_the_limit
from testing.subprocesses import lives
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.runtime import (
    HANG,
    StandIn,
    omni_over,
    stand_in_target,
    weights_for_stand_in,
)

TEXT = [user(text("What colour is the sky?"))]
AT_ONCE_S = 20.0  # of a busy machine; a request would wait for its calls for 120 s
# 4.57 chooses another code for the picture, also beside the CPU's engines.
MEDIA = "image-and-audio" if Version(transformers.__version__) >= Version("5") else "two-clips"
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return weights_for_stand_in(checkpoint, tmp_path_factory.mktemp("two"), stand_in_target(), tp=2)


@dataclass(frozen=True)
class Split:
    """Each stage in a process with two ranks. seen: what each rank was given."""

    omni: Qwen3Omni
    seen: Path
    calls: Calls


@pytest.fixture(scope="module", params=[False, again(True)], ids=["as they are", "captured"])
def split(
    request: pytest.FixtureRequest, two: EngineSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    """Captured or not: of test_torchneuron_graphs.py one rank captures all; below two the audio."""
    seen = tmp_path_factory.mktemp("seen")
    runtime = StandIn(seen, caches=False, captures=request.param)
    calls, target = ungated(), stand_in_target(runtime)
    engines = load_engines(target, two, LoadOptions(placement="split", instance="trn2.48xlarge"))
    with omni_over(watching(calls)(engines), two) as omni:
        yield Split(omni, seen, calls)


def assert_replies(omni: Qwen3Omni, reference: Reference, name: str) -> None:
    messages: Any = TEXT if name == "text" else CASES[name].messages
    mine, theirs = reply_to_the_limit(omni, reference, messages, tokens=6, talker_max_new_tokens=12)
    assert_same(mine, theirs, reference)


@pytest.mark.parametrize("name", ["text", MEDIA])
def test_replies_of_two_ranks_a_stage_are_transformers(
    split: Split, reference: Reference, name: str
) -> None:
    assert_replies(split.omni, reference, name)


def test_turns_that_follow_compute_only_their_new_rows(split: Split, reference: Reference) -> None:
    """A second turn follows what its slot holds; another one in its place cuts the slot back."""
    omni, calls = split.omni, split.calls
    calls.made.clear()
    messages: list[Any] = [user(text("Name a river."))]
    results = [omni.generate_audio(messages, **LIMITS, **GREEDY)]
    messages.append(assistant(results[0].text))
    for question in ("And the one after it?", "And the one before it?"):
        mine, theirs = reply_to_the_limit(
            omni, reference, [*messages, user(text(question))], tokens=6, talker_max_new_tokens=12
        )
        assert_same(mine, theirs, reference)
        results.append(mine)
    first, *later = [result.timings for result in results]
    assert calls.rows("thinker.prefill") == [
        timings.prompt_tokens - timings.reused_tokens for timings in (first, *later)
    ]
    # The reply's text may be read as other tokens than it was written in.
    assert later[0].reused_tokens >= first.prompt_tokens - 3
    assert later[1].reused_tokens > later[0].reused_tokens, "up to the word that differs"
    question_rows = len(omni.prompt_builder.prompt([user(text(question))]).talker.token_ids)
    assert calls.rows("talker.prepare")[1] <= question_rows
    assert calls.rows("talker.prepare")[2] < question_rows
    assert not calls.rows("thinker.copy")
    streams = [omni.stream(messages, **LIMITS, **GREEDY) for _ in range(2)]
    codes = [[*stream][-1].result.codes.tolist() for stream in streams]
    assert codes[0] == codes[1]
    assert calls.rows("thinker.copy"), "the second slot has what the first one has computed"


def test_each_rank_has_a_core_of_its_own(split: Split) -> None:
    said = sorted(path.read_text(encoding="utf-8") for path in split.seen.iterdir())
    assert said == ["0 2 0", "1 2 1", "2 2 0", "3 2 1", "4 2 0", "5 2 1"]


def ranks_of(split: Split, core: int) -> int:
    """The id of the process that has a core."""
    for path in split.seen.iterdir():
        if path.read_text(encoding="utf-8").startswith(f"{core} "):
            return int(path.name)
    raise AssertionError(core)


def test_a_rank_that_dies_in_the_middle_ends_its_stage_alone(split: Split) -> None:
    """The talker loses one first, then the vocoder, then the thinker: the last test of `split`."""
    omni = split.omni
    pids = [int(path.name) for path in split.seen.iterdir()]
    stream = omni.stream(TEXT, thinker_max_new_tokens=40, talker_max_new_tokens=80, **GREEDY)
    next(iter(stream))
    os.kill(ranks_of(split, 3), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"rank 1 of 2 .*SIGKILL"):
        for _ in stream:
            pass
    assert time.monotonic() - started < AT_ONCE_S
    vocoder = omni._pipeline._vocoder
    os.kill(ranks_of(split, 5), signal.SIGKILL)
    started = time.monotonic()
    while vocoder.fault is None:
        assert time.monotonic() - started < AT_ONCE_S, "it is found while nothing calls the vocoder"
        time.sleep(0.01)
    assert "rank 1 of 2" in str(vocoder.fault) and "SIGKILL" in str(vocoder.fault)
    written = omni.generate_text(TEXT, thinker_max_new_tokens=4, **GREEDY)
    assert len(written.token_ids) == 4, "the thinker goes on"
    os.kill(ranks_of(split, 0), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"rank 0 of 2 .*SIGKILL"):
        omni.generate_text(TEXT, thinker_max_new_tokens=4, **GREEDY)
    assert time.monotonic() - started < AT_ONCE_S
    deadline = time.monotonic() + AT_ONCE_S
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if lives(pid)], "no rank is left"


@pytest.mark.parametrize(
    ("tp", "placement", "files", "cores"),
    [
        # More ranks than KV heads: test_parallel.py has the graphs, test_torchneuron_int8.py all.
        pytest.param("4", "shared", [4, 4, 4, 4, 4], "0123", marks=pytest.mark.repeats),
        (
            "thinker=4,talker=4,predictor=1,vocoder=1,encoders=1",
            *("shared", [4, 1, 4, 1, 1], "0123"),
        ),
        (
            "thinker=2,talker=1,predictor=2,vocoder=1,encoders=1",
            *("split", [2, 1, 1, 2, 1], "01234"),
        ),
    ],
)
def test_replies_are_transformers_at_every_degree_of_a_part(
    checkpoint: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tp: str, placement: str, files: list[int], cores: str,
) -> None:  # fmt: skip
    """A part of degree 1 is at its stage's first rank; the code predictor at the talker's."""
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "")  # what a load sets here is gone after this test
        monkeypatch.delenv(name)
    seen, tree = tmp_path / "seen", tmp_path / "tree"
    seen.mkdir()
    target = stand_in_target(StandIn(seen, captures=False))
    spec = weights_for_stand_in(checkpoint, tree, target, tp=tp)
    written = [
        len(list((tree / part / "weights").iterdir()))
        for part in (
            *("thinker/thinker", "audio/audio_encoder", "talker/talker"),
            *("code_predictor/code_predictor", "code2wav/code2wav"),
        )
    ]
    assert written == files
    options = LoadOptions(placement=placement, instance="trn2.48xlarge")
    with omni_over(load_engines(target, spec, options), spec) as omni:
        for name in ("text", MEDIA):
            assert_replies(omni, reference, name)
    said = sorted(path.read_text(encoding="utf-8").partition(" ")[0] for path in seen.iterdir())
    assert "".join(said) == cores


KILLED = "[F137] neuronx-cc was forcibly killed"


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ({}, None),
        ({0: ""}, r"audio_encoder\[windows=1\] was not compiled: its call left no NEFF"),
        ({1: ""}, r"audio_encoder\[windows=2\] was not compiled: its call left no NEFF"),
        ({0: KILLED}, r"windows=1\] was not compiled: \[F137\] .* Try --opt-level 1"),
        ({1: "no room"}, r"windows=2\] was not compiled: no room\. (?!.* Try --opt-level)"),
    ],
)
def test_a_graph_whose_compile_fails_after_its_call_is_the_one_that_is_named(
    two: EngineSpec, tmp_path: Path, late: dict[int, str], said: str | None
) -> None:
    plan = replace(two.plan, audio_windows=(1, 2))
    target = stand_in_target(StandIn(late=late))
    if said is None:
        compile_tree(plan, tmp_path, target, only=("audio",))
        assert len([*(tmp_path / "audio").rglob("*.neff")]) == 2
    else:
        with pytest.raises(CompileError, match=said):
            compile_tree(plan, tmp_path, target, only=("audio",))
        assert not (tmp_path / "audio").exists()


def test_two_ranks_find_what_one_process_has_compiled_and_one_that_hangs_ends_all(
    two: EngineSpec, tmp_path: Path
) -> None:
    """Compiled at rank 0 of a group that is not there; captured by both over gloo.

    Then one loops before the graph, and the other waits for it in the graph's first collective.
    """
    compile_tree(two.plan, tmp_path, stand_in_target(), only=("audio",))
    spec = replace(two, compiled=tmp_path)
    seen = tmp_path / "seen"
    seen.mkdir()
    ranks = ModelRanks(spec, StandIn(seen, names=tuple(CACHES)), ("thinker",), hangs_s=1.0)
    folders = [folder for path in seen.iterdir() for folder in path.read_text().split()]
    assert len(set(folders)) == len(folders) == len(ranks.pids) * len(CACHES) == 2 * 4
    part = ranks.part("audio_encoder")
    (graph,) = part.graphs.values()
    assert graph.label == "audio_encoder[windows=1]"
    os.kill(ranks.pids[1], HANG)
    started = time.monotonic()
    with pytest.raises(EngineDiedError) as caught:
        part.call(graph.label, *graph.example()[: len(graph.inputs)])
    assert time.monotonic() - started < AT_ONCE_S
    said = str(caught.value)
    assert re.match(r"The rank 0 of 2 .*rank 1 of 2 .* did not finish 'run audio_encoder aud", said)
    assert "within 1.0 s, which ended all" in said
    ranks.close()
    assert not [pid for pid in ranks.pids if lives(pid)]
