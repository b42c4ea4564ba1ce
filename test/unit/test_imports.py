"""Packages that a load and requests import, in a process of its own."""

import ast

import pytest

from testing.imports import ROOT
from testing.media_cases import QUESTION_WAV
from testing.repeats import again
from testing.subprocesses import run_python

# Each takes from 10 ms to 3 s; and those of target neuron.
HEAVY = {
    *("qwen3_omni_neuron.neuron", "neuronx_distributed"),
    *("transformers", "torchvision", "torchaudio", "torch._dynamo", "torch._inductor", "sympy"),
    *("torch.distributed.tensor", "triton", "scipy", "pandas", "librosa", "sklearn", "numba"),
    *("matplotlib", "huggingface_hub", "httpx", "requests", "safetensors.torch", "setuptools"),
    *("tqdm", "PIL", "av", "soxr", "soundfile"),
}
# At 16 kHz, as it is wanted: there is nothing to resample.
CONTENTS = ("Hello", [{"type": "audio", "audio": str(QUESTION_WAV)}])
SCRIPT = f"""
import sys
import torch

of_torch = set(sys.modules)
from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni

limits = dict(thinker_max_new_tokens=2, talker_max_new_tokens=2)
with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1, context_length=256) as omni:
    for content in {CONTENTS!r}:
        omni.generate_audio([dict(role="user", content=content)], **limits)
        print(sorted({HEAVY!r} & set(sys.modules) - of_torch))
"""


def test_a_load_imports_what_sound_needs_and_requests_no_more() -> None:
    assert run_python("-c", SCRIPT).splitlines() == ["['soundfile']"] * 2


@pytest.mark.parametrize("switch", [again("enable"), "disable"])
def test_an_import_leaves_the_garbage_collector_as_it_was(switch) -> None:
    script = f"import gc; gc.{switch}(); runs = []; "
    script += "gc.callbacks.append(lambda phase, info: runs.append(phase)); "
    script += "from qwen3_omni_neuron import Qwen3Omni; "
    script += "print(gc.isenabled(), gc.get_freeze_count(), len(runs) < 100)"
    assert run_python("-c", script).split() == [str(switch == "enable"), "0", "True"]


def test_the_package_and_the_command_line_import_little_before_they_need_it() -> None:
    script = "import sys; before = set(sys.modules); import qwen3_omni_neuron; "
    script += "print(*{'importlib.metadata', 'numpy', 'torch'} & set(sys.modules) - before); "
    script += "import qwen3_omni_neuron.cli; print('torch' in sys.modules)"
    assert run_python("-c", script).split() == ["False"]


PARSED = (["--help"], ["serve", "--help"], ["speak", "Hello", "--nonsense"], ["transcribe"])
PARSER_SCRIPT = f"""
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO

from qwen3_omni_neuron import cli

for arguments in {PARSED!r}:
    with suppress(SystemExit), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        cli.main(arguments)
servers = {{"pydantic", "fastapi", "starlette", "uvicorn", "prometheus_client"}}
print(*({{"torch", "numpy"}} | servers) & set(sys.modules))
import qwen3_omni_neuron.api

print(*servers & set(sys.modules))
"""


def test_the_parser_and_what_it_prints_need_no_large_package() -> None:
    """Nor does Python's interface need one of the server's."""
    assert run_python("-c", PARSER_SCRIPT).split() == []


def test_tests_that_run_through_ray_too_are_where_they_are_taken_from() -> None:
    """Without Ray, `test_through_ray.py` is skipped before it imports them."""
    test = ROOT / "test"
    tree = ast.parse((test / "fleet" / "test_through_ray.py").read_text())
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    taken = [n for n in imports if str(n.module).startswith("test_")]
    assert taken
    for module in taken:
        given = ast.parse((test / "integration" / f"{module.module}.py").read_text())
        functions = {node.name for node in given.body if isinstance(node, ast.FunctionDef)}
        names = {n.id for n in ast.walk(given) if isinstance(n, ast.Name)}
        assert {name.name for name in module.names} <= functions | names
