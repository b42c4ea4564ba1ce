"""Replies after rows have left their slot, through memory and through files."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import BusyError, OptionError, OutputError
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import Request
from qwen3_omni_neuron.runtime.spill import SpilledRows
from testing.media_cases import audio, image, text, user

LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}


def conversation(number: int) -> list[dict[str, Any]]:
    words = text(f"You are number {number}. Look and listen.")
    return [user(words, image(64, 64, number), audio(1.5, 200.0 + number))]


def wait_until_copied(omni: Qwen3Omni) -> None:
    until_s = time.perf_counter() + 60.0
    caches = omni._pipeline._thinker.cache, omni._pipeline._talker.cache
    while any(cache._uncopied for cache in caches):
        assert time.perf_counter() < until_s
        time.sleep(0.001)


def damage_files(folder: Path) -> None:
    """Change the last byte of every other file."""
    for path in sorted(folder.glob("rows-*/*"))[::2]:
        contents = path.read_bytes()
        path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


@pytest.mark.parametrize(
    ("where", "load", "between"),
    [
        ("memory", {"spill_bytes": 1 << 26}, lambda folder: None),
        ("memory", {"spill_bytes": 1 << 26, "kv_cache_dtype": "bfloat16"}, lambda folder: None),
        ("memory", {"spill_bytes": 1 << 26, "placement": "split"}, lambda folder: None),
        ("disk", {"spill_bytes": 1 << 16, "spill_folder": ""}, lambda folder: None),
        ("disk", {"spill_bytes": 1 << 16, "spill_folder": ""}, damage_files),
    ],
    ids=["memory", "bfloat16", "processes", "files", "damaged files"],
)
def test_replies_after_a_slot_was_lost_are_those_of_a_kept_one(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    load: dict[str, Any],
    between: Callable[[Path], None],
) -> None:
    """Sampled codes and tokens show that logits are the same to the bit."""
    # On a busy machine a file may take longer than a tiny model's rows, which would be computed.
    monkeypatch.setattr(SpilledRows, "expected_s", lambda *arguments: 0.0)
    load = load | ({"spill_folder": tmp_path} if "spill_folder" in load else {})
    kept_load = {k: v for k, v in load.items() if k == "kv_cache_dtype"}
    with (
        Qwen3Omni.load(checkpoint, max_concurrency=2, **kept_load) as kept,
        Qwen3Omni.load(checkpoint, max_concurrency=1, **load) as spilling,
    ):
        histories = [conversation(number) for number in range(2)]
        for turn in range(2):
            for number, messages in enumerate(histories):
                options = {"seed": 10 * turn + number, **LIMITS}
                ours = spilling.generate_audio(messages, **options)
                right = kept.generate_audio(messages, **options)
                assert ours.token_ids == right.token_ids
                assert np.array_equal(ours.codes, right.codes)
                wait_until_copied(spilling)
                if turn and between is not damage_files:
                    lost = right.timings.reused_tokens - ours.timings.reused_tokens
                    assert 0 <= lost < 16
                messages.append({"role": "assistant", "content": right.text})
                messages.append(user(text("And this?"), audio(0.5)))
            between(tmp_path)
        status = spilling.status().spill
        assert status is not None
        assert status.restored_rows[where] > 0
        assert (status.failures > 0) == (between is damage_files)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"spill_bytes": -1}, OptionError, "spill_bytes must be .* 0 or more, got -1"),
        ({"spill_folder_bytes": 0}, OptionError, "spill_folder_bytes must be .* 1 or more, got 0"),
        ({"spill_bytes": 1}, OptionError, "spill_bytes is 1, and 16 rows of the thinker take"),
        ({"spill_bytes": 1 << 20, "reuse": False}, OptionError, "without a prefix cache"),
        ({"spill_bytes": 1 << 20, "spill_folder": "/dev/null"}, OutputError, "can't be used"),
    ],
)
def test_a_load_refuses_what_cannot_be_spilled(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    """Engines that were built before, such as those in processes of their own, are closed."""
    built, closed = [], []

    def watch(engines: Engines) -> Engines:
        for engine in (engines.thinker, engines.talker, engines.vocoder):
            built.append(engine)
            monkeypatch.setattr(engine, "close", partial(closed.append, engine))
        return engines

    with pytest.raises(error, match=said):
        Qwen3Omni.load(checkpoint, **given, wrap_engines=watch)
    assert built == closed
    assert bool(built) == (error is OutputError or "rows of the thinker take" in said)


@pytest.mark.parametrize("spill_bytes", [0, 1 << 20])
def test_blocks_are_hashed_before_the_pipeline_gets_a_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, spill_bytes: int
) -> None:
    """Its lock is held while they are compared. Where no rows are spilled, nothing is hashed."""
    hashed = []

    def submit(pipeline: Pipeline, request: Request, after: Any = None) -> Any:
        assert request.keys is not None
        keys = request.keys.thinker, request.keys.talker
        hashed.extend("block_digests" in vars(one) for one in keys)
        raise BusyError("not now")

    monkeypatch.setattr(Pipeline, "submit", submit)
    with Qwen3Omni.load(checkpoint, spill_bytes=spill_bytes) as omni, pytest.raises(BusyError):
        omni.generate_audio(conversation(0))
    assert hashed == [spill_bytes > 0] * 2


def test_a_load_closes_its_engines_where_their_wrapper_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Engines] = []

    def close(engines: Engines) -> None:
        closed.append(engines)

    def fail(engines: Engines) -> Engines:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engines, "close", close)
    with pytest.raises(KeyboardInterrupt):
        Qwen3Omni.load(checkpoint, wrap_engines=fail)
    assert len(closed) == 1
