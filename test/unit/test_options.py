"""The declared options: one set of names and types, for Python's signatures, parsing and tables."""

import os
import re
import subprocess
import sys
import typing
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli.speak import _FOR_PROGRAMS, add_speak
from qwen3_omni_neuron.engines.sampling import SamplingParams
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.options import (
    LOAD_OPTIONS,
    REQUEST_OPTIONS,
    GenerateArguments,
    LoadArguments,
    LoadOptions,
    RequestArguments,
    RequestOptions,
    SpeechArguments,
)
from testing.imports import package_files

REPOSITORY = Path(__file__).parents[2]
# The package alone is read: what it imports of others is taken for Any, which saves a minute.
MYPY = """
[mypy]
follow_imports = silent
mypy_path = src
explicit_package_bases = true
python_version = 3.10
[mypy-torch.*,numpy.*,transformers.*,safetensors.*,PIL.*,huggingface_hub.*,jinja2.*,tqdm.*,soxr.*]
follow_imports = skip
ignore_missing_imports = true
"""
CALLS = """
from qwen3_omni_neuron import Qwen3Omni, generate_audio

with Qwen3Omni.load("folder") as omni:
    omni.stream([], speaker="Ethan", seed=1, thinker_top_k=None, chunk_frames=(1, 2))
    omni.generate_audio([], thinker_eos_token_id=[1, 2], wait_timeout_s=3)
    omni.generate_text([], thinker_temprature=1.0)  # thinker_temprature
    omni.generate_text([], speaker=3)  # speaker
    omni.stream([], talker_top_k="many")  # talker_top_k
    omni.generate_audio([], seed=1.5)  # seed
result = generate_audio([], "folder", dtype="float32", cores={"thinker": "0-7"}, seed=1)
result.audio, result.timings.ttfb_s
generate_audio([], "folder", placment="split")  # placment
generate_audio([], "folder", max_concurrency="many")  # max_concurrency
generate_audio([], "folder", use_audio_in_video=2)  # use_audio_in_video
"""


def types_of(holder: Any) -> dict[str, Any]:
    return typing.get_type_hints(holder)


def test_arguments_and_options_are_the_same() -> None:
    request, load, speech = map(types_of, (RequestArguments, LoadArguments, SpeechArguments))
    assert request == types_of(RequestOptions) and load == types_of(LoadOptions)
    assert [option.name for option in REQUEST_OPTIONS] == list(types_of(RequestOptions))
    assert list(LOAD_OPTIONS) == list(load)
    assert types_of(GenerateArguments) == load | request and not set(load) & set(request)
    assert not any(name.startswith("thinker_") for name in speech)
    assert {name for name in request if name.startswith(("talker_", "predictor_"))} < set(speech)


def test_a_wrong_name_is_refused_with_the_likely_one(checkpoint) -> None:
    with pytest.raises(OptionError, match="unknown option 'thinker_top_k'"):
        RequestOptions.parse({"thinker_top_k": 3}, SpeechArguments)
    with pytest.raises(OptionError, match=r"unknown option 'dtpye'\. Did you mean dtype\?"):
        Qwen3Omni.load(checkpoint, dtpye="auto")  # type: ignore[call-arg]


def test_a_type_checker_sees_wrong_names_and_types(tmp_path) -> None:
    config, calls = tmp_path / "mypy.ini", tmp_path / "calls.py"
    config.write_text(MYPY, encoding="utf-8")
    calls.write_text(CALLS.replace('stream("",', "stream([],"), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(calls)]
    done = subprocess.run(
        [*command, "--no-error-summary", "--cache-dir", str(tmp_path / "cache")],
        cwd=REPOSITORY,
        env={**os.environ, "MYPYPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = calls.read_text(encoding="utf-8").splitlines()
    wrong = {number: line.split("# ")[1] for number, line in enumerate(lines, 1) if "# " in line}
    reported = {}
    for line in done.stdout.splitlines():
        place, kind, message = line.split(": ", 2)
        assert place.startswith(str(calls)) and kind in ("error", "note"), line
        if kind == "error":
            reported[int(place.rpartition(":")[2])] = message
    assert set(reported) == set(wrong), done.stdout + done.stderr
    for number, name in wrong.items():
        assert f'"{name}"' in reported[number]


def test_a_default_is_in_range_and_none_only_where_it_is_the_default() -> None:
    for option in LOAD_OPTIONS.values():
        option.check(option.default)
        if option.values is not None:
            with pytest.raises(OptionError, match=f"{option.name} must be .*, got b"):
                LoadOptions.parse({option.name: b""})
    for option in REQUEST_OPTIONS:
        option.check(option.default)
        if option.default is None:
            assert option.shown
        else:
            with pytest.raises(OptionError, match=f"{option.name} must be .*, got None"):
                RequestOptions.parse({option.name: None})


def test_the_command_line_has_a_flag_for_every_option() -> None:
    parser = ArgumentParser()
    add_speak(parser)
    values = {str: "Ethan", bool: "true", int: "3", float: "0.5"}
    options = [option for option in REQUEST_OPTIONS if option.name not in _FOR_PROGRAMS]
    given = {o.name: values[o.value_type] for o in options if o.value_type in values}
    given = given | {"chunk_frames": "1,2", "first_chunk": "early", "runaway_speech": "keep"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    parsed = vars(parser.parse_args(flags))
    RequestOptions.parse({name: parsed[name] for name in given})
    assert len(given) == len(options) and parsed["chunk_frames"] == (1, 2)


def test_something_uses_every_option_of_a_request() -> None:
    read = {n for file in package_files() for n in re.findall(r"\.(\w+)", file.read_text())}
    for stage in ("thinker", "talker", "predictor"):  # RequestOptions.sampling
        read |= {f"{stage}_{field.name}" for field in fields(SamplingParams)}
    for option in REQUEST_OPTIONS:
        assert option.name in read, f"nothing uses {option.flag} ({option.name})"


def test_limits_in_the_openapi_document_are_those_that_are_checked() -> None:
    limited = {o.name: o.values for o in REQUEST_OPTIONS if o.values and o.values.limits}
    assert {"talker_temperature", "predictor_top_k", "first_chunk", "wait_timeout_s"} <= set(
        limited
    )
    for name, values in limited.items():
        limits, accepts = values.limits, values.accepts
        assert all(accepts(limits[key]) for key in ("minimum", "maximum") if key in limits), name
        below = limits["minimum"] - 1 if "minimum" in limits else limits.get("exclusiveMinimum", -1)
        assert not accepts(below), name
        assert "maximum" not in limits or not accepts(limits["maximum"] + 1), name
        assert all(accepts(one) for one in limits.get("enum", ())), name
        assert "minItems" not in limits or not accepts([]), name


def test_logprobs_and_stop_are_not_given_together() -> None:
    with pytest.raises(OptionError, match="logprobs can't be combined with stop"):
        RequestOptions.parse({"logprobs": True, "stop": ["."]})
