"""The engines of target torchneuron over the stand-in, one rank: replies are transformers'."""

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.compilation.manifest import read_manifest, verify_files
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODELS
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.compilation.versions import installed_version
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import ArtifactError, EngineError, NotInstalledError, OptionError
from qwen3_omni_neuron.events import AudioChunk
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.torchneuron.build import ModelRanks, build_engines
from qwen3_omni_neuron.neuron.torchneuron.environment import GraphCaches
from qwen3_omni_neuron.neuron.torchneuron.runtime import expected_bytes
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import CASES, text, user
from testing.repeats import RUNS_ALL
from testing.replies import GREEDY, assert_same, reply_to_the_limit
from testing.specs import cpu_engines
from testing.subprocesses import lives
from testing.torchneuron import backend
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.runtime import StandIn, compile_for_stand_in, no_network, omni_over
from testing.torchneuron.supported import SUPPORTED

TEXT = [user(text("What colour is the sky?"))]
LIMITS = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
OTHER_CODES = "4.57 chooses another code for these pictures, also beside the CPU's engines"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def spec(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("torchneuron") / "tree"
    return compile_for_stand_in(checkpoint, folder, max_concurrency=3, batches=(1,))


@pytest.fixture(scope="module")
def tree(spec: EngineSpec) -> Path:
    assert spec.compiled is not None
    return spec.compiled


@pytest.fixture(scope="module")
def called() -> Iterator[set[str]]:
    """Labels of graphs that were called, but for those of loads."""
    labels: set[str] = set()
    run = ModelRanks._run

    def watched(ranks: ModelRanks, name: str, label: str, *given: Any) -> Any:
        labels.add(label if len(given) == 1 else f"{label}, then {given[1].label}")
        return run(ranks, name, label, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRanks, "_run", watched)
        yield labels


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def engines(spec: EngineSpec, called: set[str], home: Path) -> Engines:
    """Captured, as a device runs them, but for the thinker: test_torchneuron_graphs.py has it.

    Loaded with an empty home and no network.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setattr(socket.socket, "connect", no_network)
        built = build_engines(spec, ["thinker"], StandIn(captures=RUNS_ALL))
        built |= build_engines(spec, ["talker", "vocoder"], StandIn())
    called.clear()
    return Engines.of(built)


def read_at_ranks(engines: Engines, name: str) -> list[Any]:
    """Read an attribute of each stage's rank."""
    ranks: list[Any] = [getattr(engines, stage).fault for stage in STAGES]
    return [rank.__self__._group.read(name) for rank in ranks]


def test_a_load_finds_all_in_the_tree(engines: Engines, home: Path) -> None:
    assert read_at_ranks(engines, "compiled") == [[]] * 3
    assert not list(home.iterdir())


@pytest.fixture(scope="module")
def ours(engines: Engines, spec: EngineSpec) -> Iterator[Qwen3Omni]:
    with omni_over(engines, spec) as omni:
        yield omni


@pytest.fixture(scope="module")
def cpu(spec: EngineSpec) -> Iterator[Qwen3Omni]:
    with omni_over(cpu_engines(replace(spec, compiled=None)), spec) as omni:
        yield omni


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.mark.parametrize("name", ["text", "image-and-audio", "two-clips", "video"])
def test_a_reply_is_transformers(ours: Qwen3Omni, reference: Reference, name: str) -> None:
    if name in ("image-and-audio", "video") and Version(transformers.__version__) < Version("5"):
        pytest.skip(OTHER_CODES)
    messages: Any = TEXT if name == "text" else CASES[name].messages
    more = {"video_second_per_grid": CASES[name].seconds_per_grid} if name == "video" else {}
    mine, theirs = reply_to_the_limit(
        ours, reference, messages, tokens=6, talker_max_new_tokens=12, **more
    )
    assert_same(mine, theirs, reference)


REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    (TEXT, {"seed": 1, "predictor_top_p": 0.3}),
    (CASES["image-and-audio"].messages, {"seed": 3, "predictor_top_k": 10}),
    (TEXT, GREEDY),
    (CASES["two-clips"].messages, {"seed": 4, "predictor_do_sample": False}),
    (TEXT, {"seed": 5, "thinker_do_sample": True}),
    (CASES["video"].messages, {"seed": 6, "predictor_top_k": 1}),
    (TEXT, {"seed": 7}),
    (CASES["two-clips"].messages, {"seed": 8}),
]


def test_eight_at_once_are_the_cpus_alone_and_seeds_hold(ours: Qwen3Omni, cpu: Qwen3Omni) -> None:
    """Over three slots: batches of one and of three, with idle rows, and slots used before."""
    streams = [ours.stream(messages, **LIMITS, **options) for messages, options in REQUESTS]
    for stream, (messages, options) in zip(streams, REQUESTS, strict=True):
        events = list(stream)
        theirs = cpu.generate_audio(messages, **LIMITS, **options)
        mine = events[-1].result
        assert mine.token_ids == theirs.token_ids
        assert mine.codes.tolist() == theirs.codes.tolist()
        assert np.abs(mine.audio - theirs.audio).max() < 1e-5
        streamed = np.concatenate([e.samples for e in events if isinstance(e, AudioChunk)])
        assert np.array_equal(streamed, mine.audio)


def test_rows_of_earlier_prompts_are_cached(
    ours: Qwen3Omni, cpu: Qwen3Omni, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that follows appends to its slot; the same prompt twice at once copies it."""
    starts: list[int] = []
    copies: list[int] = []
    prefill, copy = engines.thinker.prefill, engines.thinker.copy

    def watched_prefill(slot: int, prompt: Prompt, start: int, *rest: Any) -> tuple[Tensor, Tensor]:
        starts.append(start)
        return prefill(slot, prompt, start, *rest)

    def watched_copy(source: int, target: int, rows: int) -> None:
        copies.append(rows)
        copy(source, target, rows)

    monkeypatch.setattr(engines.thinker, "prefill", watched_prefill)
    monkeypatch.setattr(engines.thinker, "copy", watched_copy)
    first = [user(text("Name a river."))]
    answer = ours.generate_audio(first, **LIMITS, **GREEDY)
    spoken = {"role": "assistant", "content": answer.text}
    later = [*first, spoken, user(text("And the one after it?"))]
    mine = ours.generate_audio(later, **LIMITS, **GREEDY)
    theirs = cpu.generate_audio(later, **LIMITS, **GREEDY)
    assert starts[0] < 5, "the rows that every prompt begins with"
    assert starts[1] > starts[0] + 5, "rows of the first turn"
    assert mine.token_ids == theirs.token_ids
    assert mine.codes.tolist() == theirs.codes.tolist()
    streams = [ours.stream(later, **LIMITS, **GREEDY) for _ in range(3)]
    for stream in streams:
        *_, finished = stream
        assert finished.result.codes.tolist() == theirs.codes.tolist()
    assert copies, "two slots have what one has computed"


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_a_request_of_nan_ends_alone_and_its_slot_serves_the_next_ones(
    ours: Qwen3Omni, cpu: Qwen3Omni, engines: Engines, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Its prompt has a letter whose row is NaN; other requests run beside and after it."""
    bad, (token,) = [user(text("Name a zebra."))], ours.prompt_builder.encode_words("z")
    engine: Any = getattr(engines, stage)
    owner, name = (
        (engine._decoder, "_embedding") if stage == "thinker" else (engine.text_rows, "_rows")
    )
    table = getattr(owner, name).clone()
    table[token] = float("nan")
    monkeypatch.setattr(owner, name, table)
    cleared, clear = list[int](), engine._decoder.clear
    monkeypatch.setattr(engine._decoder, "clear", lambda slot: cleared.append(slot) or clear(slot))
    streams = [ours.stream(messages, **LIMITS, **options) for messages, options in REQUESTS[:2]]
    with pytest.raises(EngineError, match=f"The {stage} computed NaN or infinity for"):
        ours.generate_audio(bad, **LIMITS)
    streams += [ours.stream(messages, **LIMITS, **options) for messages, options in REQUESTS]
    for stream, (messages, options) in zip(streams, REQUESTS[:2] + REQUESTS, strict=True):
        *_, finished = stream
        theirs = cpu.generate_audio(messages, **LIMITS, **options)
        assert finished.result.token_ids == theirs.token_ids
        assert finished.result.codes.tolist() == theirs.codes.tolist()
    assert len(cleared) == 1


def test_after_load_copies_and_views_alone_run_outside_of_graphs(
    ours: Qwen3Omni, engines: Engines
) -> None:
    """The stand-in refuses others in every test here: cached prefixes, clears of slots, flushes."""
    loaded = read_at_ranks(engines, "counts")
    streams = [ours.stream(messages, **LIMITS, **options) for messages, options in REQUESTS]
    with ours.stream(TEXT, thinker_max_new_tokens=40) as cancelled:
        next(iter(cancelled))
    for stream in streams:
        list(stream)
    for before, after in zip(loaded, read_at_ranks(engines, "counts"), strict=True):
        assert {"empty", "copy_"} <= before.keys()
        later = after - before
        assert {"copy_", "_to_copy"} <= later.keys() <= {"copy_", "_to_copy", "unbind"}


def test_replies_so_far_have_called_every_graph(
    ours: Qwen3Omni, spec: EngineSpec, called: set[str]
) -> None:
    """The last test of `ours`: what one graph computes wrong, a reply above would show."""
    if Version(transformers.__version__) < Version("5"):
        pytest.skip(OTHER_CODES)
    labels = {graph.label for graph in all_graphs(spec.config, spec.plan)}
    assert labels - called == {"text_projection[rows=32]"}, "a load fills a table with it"
    assert any(", then talker_decode" in label for label in called), "frames in one call"


def test_the_graphs_use_the_listed_operations_alone(tree: Path) -> None:
    """The stand-in for the backend has seen those of the tree in this process."""
    assert backend.SEEN.keys() <= SUPPORTED
    unused = SUPPORTED - backend.SEEN.keys()
    assert not [name for name in unused if "_c10d" not in name], "drop them from the list"


@pytest.fixture(scope="module")
def thinker(spec: EngineSpec) -> Any:
    """A thinker whose slots no pipeline uses."""
    return build_engines(spec, ["thinker"], StandIn(captures=False))["thinker"]


def test_rows_in_any_pieces_are_the_whole(thinker: Any, ours: Qwen3Omni) -> None:
    """With media, in calls of up to 32 rows: pieces that fit one call and that take several."""
    case = CASES["image-and-audio"]
    prompt = ours.prompt_builder.prompt(case.messages, case.use_audio_in_video)
    logits, accepted = thinker.prefill(0, prompt)
    for start in (len(prompt) - 1, len(prompt) - 32, len(prompt) - 33, 3):
        seen = thinker.prefill(0, prompt, start)
        torch.testing.assert_close(seen[0], logits, atol=2e-5, rtol=0)
        rest = accepted[len(accepted) - len(seen[1]) :]
        torch.testing.assert_close(seen[1], rest, atol=2e-5, rtol=0)


def test_every_graph_was_compiled_once_and_none_while_loading(tree: Path) -> None:
    manifest = read_manifest(tree)
    assert tuple(manifest.models) == MODELS
    for model, record in manifest.models.items():
        for cache in ("neff", "hlo", "nki"):
            files = [name for name in record.files if name.startswith(f"{cache}/")]
            # The two projections are one graph: weights are its inputs.
            assert len(files) == len(record.graphs) - (model == "talker"), model
        for part in MODEL_PARTS[model]:
            assert f"{part}/weights/tp0_sharded_checkpoint.safetensors" in record.files
    assert {"thinker_flush"} < {g.name for g in manifest.models["thinker"].graphs}
    verify_files(tree, manifest)


def test_the_expected_bytes_are_those_of_the_weights(spec: EngineSpec, tree: Path) -> None:
    for model, record in read_manifest(tree).models.items():
        weights = sum(f.bytes for name, f in record.files.items() if "/weights/" in name)
        expected = expected_bytes(spec.plan, model)
        assert expected <= weights <= expected + 100_000, model


@pytest.mark.parametrize("cache", ["neff", "hlo", "nki"])
def test_a_graph_that_has_to_be_compiled_anew_fails_the_load(
    spec: EngineSpec, tree: Path, tmp_path: Path, cache: str
) -> None:
    """At the first of its two graphs, before hours of compiling."""
    copy = Path(shutil.copytree(tree, tmp_path / "tree"))
    model = copy / "code2wav"
    graphs = [path for path in (model / cache).rglob("*") if path.is_file()]
    moved = {path.rename(path.with_name(f"{n}.{cache}")) for n, path in enumerate(graphs)}
    ranks = ModelRanks(replace(spec, compiled=copy), StandIn())
    said = (
        rf"^code2wav\[streams=1,frames=4\] was compiled again at load \(1 files, .*/{cache}/.* "
        rf"first\): .* Delete {model} and compile again"
    )
    with pytest.raises(ArtifactError, match=said):
        ranks.part("code2wav")
    ranks.close()
    after = {path for path in (model / cache).rglob("*") if path.is_file()}
    assert after == moved and len(moved) == 2, "the tree is as it was"


@pytest.mark.skipif(
    installed_version("torch-neuronx") is not None,
    reason="the Neuron SDK, or its sources, are here",
)
def test_without_torchneuron_it_says_what_is_not_there(
    checkpoint: Path,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with pytest.raises(NotInstalledError, match=r"needs TorchNeuron, torch-neuronx 2\.13\.3"):
        Qwen3Omni.load(checkpoint, compiled_path=tree, instance="trn2.48xlarge")
    with pytest.raises(OptionError, match=r"trn2\.3xlarge has 4 logical cores"):
        Qwen3Omni.load(
            checkpoint,
            compiled_path=tree,
            instance="trn2.3xlarge",
            placement="split",
            cores={"thinker": "0", "talker": "1", "vocoder": "4"},
        )
    assert cli.main(["inspect", str(tree), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "target: torchneuron" in shown
    assert "thinker_prefill[rows=32,window=128]" in shown


def test_a_tree_without_neffs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing/neff has no compiled graph"):
        GraphCaches(tmp_path / "rank").restore(tmp_path / "nothing")


def test_closing_the_last_engine_ends_the_rank(spec: EngineSpec) -> None:
    ranks = ModelRanks(spec, StandIn())
    ranks.part("hidden_projection").call("hidden_projection[rows=32]", torch.zeros(32, 64))
    (pid,) = ranks.pids
    assert lives(pid)
    first, second = ranks.opened(), ranks.opened()
    first()
    assert lives(pid)
    second()
    assert not lives(pid)


def test_a_rank_that_is_killed_while_nothing_calls_it_is_its_engines_fault(
    spec: EngineSpec, engines: Engines
) -> None:
    assert [getattr(engines, stage).fault() for stage in STAGES] == [None] * 3
    vocoder: Any = build_engines(spec, ["vocoder"], StandIn(captures=False))["vocoder"]
    assert vocoder.fault() is None
    (pid,) = vocoder.fault.__self__.pids
    os.kill(pid, signal.SIGKILL)
    looks = iter(range(1000))
    while (fault := vocoder.fault()) is None:
        assert next(looks) < 999
        time.sleep(0.01)
    assert re.search(r"rank 0 of 1 .*SIGKILL", str(fault))
    vocoder.close()
