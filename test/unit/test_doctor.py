"""`doctor`: what is measured and derived of this CPU, the port and the extras."""

import json
import socket
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.cli.doctor import EXTRAS, port_text, speed_text, verdict
from qwen3_omni_neuron.compilation import versions
from qwen3_omni_neuron.compilation.versions import PACKAGE, missing_packages
from qwen3_omni_neuron.cpu import rates
from qwen3_omni_neuron.cpu.call_cost import CallSeconds, released_limits
from qwen3_omni_neuron.cpu.fits import DTYPES
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.rates import MachineRates


def test_a_reply_is_the_sum_of_its_calls() -> None:
    calls = CallSeconds(prefill=2.0, token=0.1, talker=0.01, predictor=0.02, code2wav=0.5)
    assert calls.reply(tokens=30, frames=120) == pytest.approx(2.0 + 3.0 + 120 * 0.03 + 10 * 0.5)
    assert calls.rtf == pytest.approx((2.0 + 50 * 0.1 + 200 * 0.03 + 200 / 12 * 0.5) / 16)


@pytest.mark.skipif(find_library() is None, reason="torch widens the weights without the C")
def test_the_least_time_follows_from_the_rates_of_a_machine() -> None:
    """The rates of two machines. The default code predictor reads more."""
    for measured, added_up in (
        (MachineRates(23.8e9, 88.9e9, 2), 1.72),
        (MachineRates(28.7e9, 180.9e9, 2), 1.22),
    ):
        same = released_limits(measured, {"int4": "int4"})["int4"]
        assert same.rtf == pytest.approx(added_up, abs=0.01)
        default = released_limits(measured, {"int4": "mixed"})["int4"]
        assert default.predictor - same.predictor == pytest.approx(
            0.50e9 / measured.bytes_per_s, rel=0.02
        )


def test_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one; and one call is made however little time there is."""
    now = 0.0

    def call(seconds: list[float]) -> None:
        nonlocal now
        now += seconds.pop(0)

    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: now))
    first, second = [0.1, 4.0, 3.0, 9.0], [0.1, 2.0, 5.0, 9.0]
    calls = [lambda: call(first), lambda: call(second)]
    assert rates._least_s(calls, seconds=10.0) == pytest.approx(2.0)
    assert (first, second) == ([9.0], [9.0])
    first[:] = [0.1, 7.0]
    assert rates._least_s(calls[:1], seconds=0.0) == pytest.approx(7.0)


def test_the_rates_are_those_of_the_fastest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of 1 MiB in four arrays, and a product of 16 rows, that took half a second each."""
    asked = []

    def least_s(calls: object, seconds: float) -> float:
        asked.append(seconds)
        return 0.5

    monkeypatch.setattr(rates, "_least_s", least_s)
    monkeypatch.setattr(rates, "ARRAYS_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "PRODUCT_SIZE", 16)
    assert rates.measured_rates(4, seconds=2.0) == MachineRates(2 << 20, 2 * 16**3, 4)
    assert asked == [1.0, 1.0]


def test_the_table_says_what_is_derived() -> None:
    """RTF 0.5, 0.8 and 2 at least, each with what to expect of it."""
    limits = {
        name: CallSeconds(prefill=16 * rtf, token=0, talker=0, predictor=0, code2wav=0)
        for name, rtf in (("int4", 0.5), ("int8", 0.8), ("mixed", 2.0))
    }
    lines = speed_text(MachineRates(23.84e9, 88.91e9, 2), limits)
    assert lines[0] == (
        "Measured, with 2 threads: 23.8 GB/s of memory are read, and 88.9 billion numbers a second "
        "multiplied."
    )
    assert lines[-4:] == [
        "| --- | ---: | ---: | --- |",
        "| int4 | 0.50 | 0.50 to 0.90 | as it plays |",
        "| int8 | 0.80 | 0.80 to 1.44 | close |",
        "| mixed | 2.00 | 2.00 to 3.60 | slower than it plays |",
    ]
    assert lines[-5].count("(derived)") == 2


def test_a_port_is_free_or_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = port_text(port)
    assert taken.startswith(f"{port} can't be used (") and "`serve --port`" in taken
    assert port_text(port) == f"{port} is free"


def test_an_extra_misses_what_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages of the extras that it contains, and without those of other ones."""
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


@pytest.mark.usefixtures("given_rates")
def test_the_report_answers_whether_this_machine_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict first; what a laptop needs before what Neuron needs."""
    required = ['nothing-has-this-name>=1; extra == "heic"']
    monkeypatch.setattr(metadata, "requires", {PACKAGE: required}.get)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen3-Omni-30B-A3B ")
    install = "`pip install 'qwen3-omni-neuron[heic]'`"
    assert f"| heic | HEIC pictures | nothing-has-this-name>=1 | {install} |" in lines
    for extra in EXTRAS.keys() - {"heic"}:
        assert any(line.startswith(f"| {extra} |") and "| nothing |" in line for line in lines)
    assert any(line.startswith("| default port of `serve` | 8000 ") for line in lines)
    [measured] = [line for line in lines if line.startswith("Measured, with ")]
    assert "23.8 GB/s" in measured and "88.9 billion" in measured
    neuron = lines.index("## Neuron")
    after = lines[lines.index(measured) : neuron - 1]
    assert [line.split(" | ")[0] for line in after[-len(DTYPES) :]] == [f"| {d}" for d in DTYPES]
    before = [line for line in lines[1:neuron] if "euron" in line.replace(PACKAGE, "")]
    assert [line.split(" | ")[0] for line in before] == ["| Neuron devices"]


@pytest.mark.usefixtures("given_rates")
def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["verdict", "machine", "packages", "extras", "cpu", "neuron"]
    assert report["cpu"]["measured"] == {
        "bytes_per_s": 23.8e9,
        "multiply_adds_per_s": 88.9e9,
        "threads": 2,
    }
    assert list(report["cpu"]["dtypes"]) == list(DTYPES)
    for of in report["cpu"]["dtypes"].values():
        low, high = of["rtf_expected"]
        assert low == of["rtf_least"] < high
    assert report["neuron"]["packages"]["neuron"]["torch-neuronx"]["installed"] is None


def test_the_verdict_is_about_the_fastest_dtype_that_fits() -> None:
    def cpu(**conversations: int) -> dict[str, Any]:
        rtf = {"mixed": 2.0, "int8": 1.0, "int4": 0.5}
        return {
            "memory_gb": 32.0,
            "dtypes": {
                name: {
                    "memory_gb": 71.0 / rank,
                    "conversations": conversations.get(name, 0),
                    "rtf_expected": [rtf[name], 1.8 * rtf[name]],
                }
                for rank, name in enumerate(rtf, 1)
            },
        }

    assert verdict(cpu(int4=1, int8=2), 0, None) == (
        "Qwen3-Omni-30B-A3B runs on this CPU with --dtype int4, as it plays: RTF 0.5 to 0.9 "
        "expected (seconds of work for a second of speech)."
    )
    assert "--dtype int8, slower than it plays: RTF 1.0 to 1.8" in verdict(cpu(int8=1), 0, None)
    assert verdict(cpu(), 0, None) == (
        "Qwen3-Omni-30B-A3B does not fit this machine: int4 takes 23.7 GB of memory, of 32.0. "
        "The small model that ships runs."
    )
    assert "as torch can't be imported (libx)" in verdict({"error": "libx"}, 0, None)
    assert verdict(cpu(), 16, None).startswith("There are 16 Neuron devices, and no Neuron SDK is")
    assert "and target torchneuron is installed" in verdict(cpu(), 16, "torchneuron")
