"""bench.released, over the tiny size."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import released
from qwen3_omni_neuron.compilation import runner
from qwen3_omni_neuron.cpu.native.installed import find_library
from testing.results import load_results


@pytest.mark.skipif(
    find_library() is None, reason="the C was not compiled, and these are the bytes that it reads"
)
@pytest.mark.release
def test_the_released_size_is_measured_from_drawn_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the tiny size, without processes: the tree is compiled, every figure is there."""
    monkeypatch.setattr(
        runner, "run_worker", lambda compile_model, *given: compile_model(*given[:3])
    )
    monkeypatch.setattr(released, "in_new_process", lambda function, *given: function(*given))
    small = ["--array-mb", "1", "--product-size", "64", "--repeats", "2", "--prompt", "16"]
    few = ["--tokens", "4", "--frames", "6", "--positions", "80", "--threads", "1"]
    file = tmp_path / "result.json"
    words = ["--size", "tiny", "--folder", str(tmp_path / "made"), "--json", str(file)]
    assert not released.main([*words, *small, *few])
    results = load_results(file)
    parts = {(row["stage"], row["frames"]) for row in results.rows}
    assert parts == {
        ("thinker prefill", None),
        ("thinker decode", None),
        ("talker step", 1),
        ("code predictor", 1),
        ("code2wav step", 1),
        ("code2wav step", released.CHUNK),
    }
    for row in results.rows:
        assert row["ratio"] == pytest.approx(row["median_s"] / row["limit_s"])  # of one thread
        assert row["limit_16_s"] <= row["limit_8_s"] <= row["limit_s"]
    found = results.summary
    assert found["audio_s"] == pytest.approx(6 * 0.08, abs=0.03)
    assert 0 < found["ttft_s"] < found["ttfb_s"] <= found["total_s"]
    assert found["rtf"] > 0 and found["parts_rtf"] > 0 and found["peak_mb"] > 50
    assert 0 < found["question_ttft_s"] <= found["question_ttfb_s"]
    calls_s = found["question_calls_s"]
    assert {"thinker prefill", "talker prefill", "code predictor", "code2wav"} <= calls_s.keys()
    assert calls_s["thinker prefill"] < found["question_ttft_s"]
    assert found["parts_rtf"] > found["parts_rtf_8"] > found["parts_rtf_16"]
    assert found["rates_before"].keys() == found["rates_after"].keys() <= results.rows[0].keys()
    assert 0 < found["first_sample_8_s"] < found["first_sample_s"]
    tree = tmp_path / "made" / "int4"
    size = sum(f.stat().st_size for f in tree.rglob("*") if f.is_file())
    assert found["tree_gb"] * 1e9 == pytest.approx(size)


def test_a_machine_with_too_little_memory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(released, "memory_bytes", lambda: 10**8)
    assert released.main(["--size", "tiny", "--folder", str(tmp_path / "made")]) == 1
    assert "takes 0.5 GB of memory, and this machine has 0.1" in capsys.readouterr().err


def test_a_part_is_beside_the_limit_of_its_own_threads() -> None:
    """A second of products with two threads, of which code2wav has one; the talker reads longer."""
    rates = {"read_bytes_per_s": 10, "product_multiply_adds_per_s": 100}
    of_code2wav = {"stage": released.CODE2WAV, "bytes": 1, "multiply_adds": 100, "median_s": 3.0}
    of_talker = {"stage": "talker step", "bytes": 30, "multiply_adds": 100, "median_s": 6.0}
    ratios = [
        (row["limit_s"], row["ratio"], row["limit_8_s"])
        for row in (released.with_limit({**part, **rates}, 2) for part in (of_code2wav, of_talker))
    ]
    assert ratios == [(1.0, 1.5, 0.5), (3.0, 2.0, 3.0)]


def test_the_limits_of_a_reply_are_those_of_its_own_calls() -> None:
    """Four tokens and 24 frames, two chunks of code2wav, in 10 s of audio."""
    parts = {(released.OWN_PROMPT, None): 1.0, ("thinker decode", None): 0.5}
    parts |= {("talker step", 1): 0.25, ("code predictor", 1): 0.5, ("thinker prefill", None): 9.0}
    parts |= {(released.CODE2WAV, 1): 0.125, (released.CODE2WAV, released.CHUNK): 2.0}
    rows = [
        {"stage": stage, "frames": frames, "limit_s": s, "limit_8_s": s / 2, "limit_16_s": s / 4}
        for (stage, frames), s in parts.items()
    ]
    found = released.derived(rows, Namespace(tokens=4, frames=24), 10.0)
    assert found["parts_rtf"] == (1.0 + 4 * 0.5 + 24 * 0.75 + 2 * 2.0) / 10
    assert found["first_sample_s"] == 1.0 + 0.5 + 0.75 + 0.125
    assert found["parts_rtf_16"] == pytest.approx(found["parts_rtf"] / 4)
    assert found["first_sample_8_s"] == found["first_sample_s"] / 2


def test_the_rates_are_the_medians_since_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns of two calls, of which the faster counts, and then one more."""
    seconds = iter([4.0, 2.0, 5.0, 1.0, 3.0, 4.0, 8.0, 16.0])
    monkeypatch.setattr(released, "timed", lambda call: next(seconds))
    machine = released.Machine({"read": (8, [list, list])})
    for _ in range(3):
        machine()
    assert machine.rates() == machine.rates() == {"read": 4.0}
    machine()
    assert machine.rates() == {"read": 1.0}
