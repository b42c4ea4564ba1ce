"""The comparison with OpenVINO, without OpenVINO: what is measured, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import vs_openvino
from bench.peers.openvino import OpenVino
from bench.peers.side import Job
from testing.results import load_results

FIGURES = {"load_s", "first_reply_s", "reply_s", "first_text_s", "first_sample_s", "token_s"}
FIGURES |= {"prefill_s", "loaded_mb", "peak_mb"}
JOB = Job("small", "", "float32", 2, 3, 4, 1, [], [])


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.release
def test_both_sides_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    """OpenVINO's place is taken by our own side, its export by a copy of the checkpoint."""
    environment = tmp_path / "environment"
    executable(environment / "bin" / "python", f"exec {sys.executable} -m bench.peers.ours")
    export = 'test "$*" = "export openvino --model $4 --task text-to-audio --weight-format fp32 $9"'
    executable(environment / "bin" / "optimum-cli", f'{export} && cp -r "$4" "$9"')
    file = tmp_path / "result.json"
    arguments = ["--dtypes", "float32", "--text-tokens", "3", "--frames", "4", "--repeats", "1"]
    arguments += ["--processes", "1", "--long-prompt", "60", "--environment", str(environment)]
    assert vs_openvino.main([*arguments, "--json", str(file)]) == 0
    found = load_results(file)
    assert found.benchmark == "vs_openvino"
    assert [(row["dtype"], row["side"]) for row in found.rows] == [
        ("float32", "ours"),
        ("float32", "openvino"),
    ]
    for row in found.rows:
        assert row.keys() == {"dtype", "side", "process", "load_average"} | FIGURES
        assert all(row[figure] > 0 for figure in FIGURES)
        assert row["first_text_s"] < row["reply_s"]
        assert row["loaded_mb"] <= row["peak_mb"]
    ours, theirs = found.rows
    summary = found.summary["float32"]
    assert summary["ours"] == {figure: ours[figure] for figure in FIGURES}
    assert summary["ratios"]["reply_s"] == pytest.approx(theirs["reply_s"] / ours["reply_s"])
    models = environment / "models"
    assert {folder.name for folder in models.iterdir()} == {
        "tiny-checkpoint",
        "tiny-openvino-float32",
        "tiny-ours-float32",
    }


def answer(number: int) -> dict[str, Any]:
    """Return what a side answers for two replies."""
    return {
        "prompt_tokens": [[45, 45, 45, 497]] * 2,
        "samples": [7125, 7125],
        "token_ids": [[number, 6, 7], [8, 9, 10]],
        "probes": [[0.5, -0.5], [0.25, 0.25]],
    }


class Pipeline:
    """openvino_genai.OmniPipeline: keeps its arguments, answers with two tokens and two chunks."""

    def __init__(self, *arguments: Any, **properties: Any):
        self.arguments, self.properties = arguments, properties
        self.asked: list[dict[str, Any]] = []

    def generate(self, prompt: str, **options: Any) -> SimpleNamespace:
        self.asked.append({"prompt": prompt, **options})
        options["streamer"].write(3)
        options["streamer"].write([4])
        if options["speech_streamer"]:
            assert options["speech_streamer"](None) is None, "any other answer may end the speech"
            options["speech_streamer"](None)
        speech = options["talker_speech_config"]
        sound = [SimpleNamespace(data=np.ones((1, 1, 5)))] if speech.return_audio else []
        return SimpleNamespace(
            speech_result=SimpleNamespace(waveforms=sound),
            perf_metrics=SimpleNamespace(get_num_input_tokens=lambda: 45),
        )


@pytest.fixture
def genai(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(
        OmniPipeline=Pipeline,
        OmniTalkerSpeechConfig=lambda: SimpleNamespace(return_audio=True),
        GenerationConfig=SimpleNamespace,
        StreamerBase=object,
        StreamingStatus=SimpleNamespace(RUNNING="running"),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", module)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("float32", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
        ("auto", {}),
        ("int8", {}),
    ],
)
def test_openvino_is_asked_for_the_same_reply(
    genai: None, dtype: str, precision: dict[str, str]
) -> None:
    side = OpenVino(replace(JOB, dtype=dtype))
    pipeline = side._pipeline
    assert pipeline.arguments == ("small", "CPU")
    assert pipeline.properties == {"INFERENCE_NUM_THREADS": 2, **precision}
    whole = side.speak("a", 3, 4, one_frame_chunks=False)
    chunked = side.speak("b", 3, 4, one_frame_chunks=True)
    written = side.write("c", 3)
    for reply, samples in ((whole, 5), (chunked, 5), (written, 0)):
        assert (reply.prompt_tokens, reply.token_ids, len(reply.audio)) == (45, [3, 4], samples)
        assert 0 < reply.first_text_s < reply.total_s
    assert whole.first_sample_s is written.first_sample_s is None
    assert chunked.first_sample_s is not None
    assert chunked.first_text_s < chunked.first_sample_s < chunked.total_s
    texts = [vars(asked["text_config"]) for asked in pipeline.asked]
    assert texts == [{"max_new_tokens": 3, "do_sample": False, "ignore_eos": True}] * 3
    speech = [vars(asked["talker_speech_config"]) for asked in pipeline.asked]
    greedy = {"talker_top_k": 1, "cp_top_k": 1, "talker_repetition_penalty": 1.0}
    same = {"return_audio": True, "speaker": "Ethan", "max_new_tokens": 4, **greedy}
    assert speech == [same, {**same, "audio_chunk_frames": 1}, {"return_audio": False}]
