"""`doctor`: this machine, versions, and what is missing."""

import json
import re
from importlib import metadata

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.cli.doctor import EXTRAS
from qwen3_omni_neuron.compilation import versions
from qwen3_omni_neuron.compilation.versions import PACKAGE, missing_packages


def test_an_extra_misses_what_is_not_there_or_too_old(monkeypatch) -> None:
    there = {"torch": "2.9", "fastapi": "0.100", "uvicorn": "0.60"}
    monkeypatch.setattr(versions, "installed_version", there.get)
    required = [
        "torch>=2.9",
        'fastapi>=0.115; extra == "serve"',
        'uvicorn>=0.54; extra == "serve"',
        'uvloop>=0.21; sys_platform == "none" and extra == "serve"',
        'ray[serve]>=2.60; extra == "ray"',
        f'{PACKAGE}[serve]; extra == "ray"',
        'av>=14.2; extra == "video"',
    ]
    assert missing_packages(required, "serve") == ["fastapi>=0.115"]
    assert missing_packages(required, "ray") == ["ray>=2.60", "fastapi>=0.115"]
    assert missing_packages(required, "video") == ["av>=14.2"]


def test_the_report_has_the_machine_and_names_what_is_missing(monkeypatch, capsys) -> None:
    required = ['nothing-has-this-name>=1; extra == "video"']
    monkeypatch.setattr(metadata, "requires", {PACKAGE: required}.get)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    install = "`pip install 'qwen3-omni-neuron[video]'`"
    assert f"| video | nothing-has-this-name>=1 | {install} |" in lines
    for extra in set(EXTRAS) - {"video"}:
        assert f"| {extra} | nothing | |" in lines
    assert any(line.startswith("| CPU | ") and line.endswith(" cores |") for line in lines)
    assert any(line.startswith("| memory | ") and "GB available" in line for line in lines)
    assert any(re.fullmatch(r"\| load \| .* it raises TTFB and RTF \|", line) for line in lines)
    assert "| NEURON_RT_VISIBLE_CORES | 0-7 |" in lines
    level = "-O2, or -O1 or -O3 with compile --opt-level"
    assert f"| NEURON_COMPILER_OPT_LEVEL | {level} |" in lines
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["machine", "packages", "extras", "neuron"]
    assert report["extras"]["video"] == ["nothing-has-this-name>=1"]
