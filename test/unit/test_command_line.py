"""The parser: help, examples, errors that name a flag, completion; and pipes that are closed."""

import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.cli import compile as compile_verb
from qwen3_omni_neuron.cli import main, make_parser
from qwen3_omni_neuron.cli.parsing import with_flags
from qwen3_omni_neuron.compilation.loading import TARGETS
from qwen3_omni_neuron.compilation.plan import MODELS
from qwen3_omni_neuron.compilation.runner import Outcome
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.errors import ExitStatus, OptionError
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings
from qwen3_omni_neuron.serving.server import Server
from testing.command_examples import examples, verbs
from testing.media_cases import QUESTION_WAV

VERBS = verbs()
REPOSITORY = Path(__file__).parents[2]


def test_the_help_of_a_verb_has_examples_that_it_takes(capsys) -> None:
    for verb in VERBS:
        for words in examples(verb):
            assert words[0] == verb
            assert make_parser().parse_args(words).run is not None
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        usage = shown.split("\n\n")[0]
        assert usage.startswith(f"usage: qwen3-omni-neuron {verb} ") and len(usage) < 300
        assert "examples:\n  qwen3-omni-neuron " in shown


def test_without_a_verb_it_shows_its_help_and_with_version_its_version(capsys) -> None:
    assert main([]) == ExitStatus.OK
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb}" in shown
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"qwen3-omni-neuron {PACKAGE_VERSION}\n"


WRONG = {
    "speak a --spaeker b": "unknown arguments: --spaeker b. Did you mean --speaker?",
    "speak a --colour=b": "unknown argument: --colour=b.",
    "speak a --voice b": "unknown arguments: --voice b. Did you mean --speaker?",
    "speak a --temperature 1": "unknown arguments: --temperature 1. Did you mean --thinker-temp",
    "say a --temperature 1": "unknown arguments: --temperature 1. Did you mean --talker-temp",
    "speak a --max-tokens 9": "unknown arguments: --max-tokens 9. Did you mean --thinker-max-new",
    "transcribe a --max-tokens=9": "unknown argument: --max-tokens=9. Did you mean --max-new",
    "verify --device-map a": "unknown arguments: --device-map a. Did you mean --device?",
    "speak a --device b": "unknown arguments: --device b. Did you mean --compiled?",
    "speak a --target b": "unknown arguments: --target b. Did you mean --compiled?",
    "say a b": "unknown argument: b.",
    "speak a --thinker-max-new-tokens 0": "argument --thinker-max-new-tokens: must be an int",
    "speak --talker-top-p a": "argument --talker-top-p: must be a number from 1e-09",
    "speak --placement here": "argument --placement: must be shared or split, got 'here'",
    "transcribe a --max-new-tokens 0": "argument --max-new-tokens: must be an integer of 1 or more",
    "serve --port 65536": "argument --port: must be an integer from 0 to 65535, got '65536'",
    "compile --buckets 1,b": "argument --buckets: must be of type tuple, got '1,b'",
    "compile --resume": "--resume was removed: leave it out",
    "serve --max-bodies-bytes 1": "--max-bodies-bytes was removed: use --max-held-bytes",
    "push tree": "push was removed: use `aws s3 sync`",
    "completion bash": "completion was removed: run `shtab ",
    "speek": "unknown command 'speek'. Did you mean speak?",
    "qqqq": "unknown command 'qqqq'.",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_argument_is_told_in_a_line_that_names_its_flag(command, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == ExitStatus.WRONG_COMMAND_LINE
    usage, said = capsys.readouterr().err.splitlines()
    verb = command.split(maxsplit=1)[0]
    program = f"qwen3-omni-neuron {verb}" if verb in VERBS else "qwen3-omni-neuron"
    assert usage.startswith(f"usage: {program} ")
    assert said.startswith(f"{program}: error: {WRONG[command]}")


def test_an_option_that_was_removed_is_refused_with_what_to_use_instead() -> None:
    for parse in (LoadOptions.parse, FleetSettings.parse):
        with pytest.raises(OptionError, match="max_bodies_bytes was removed: use max_held_bytes"):
            parse({"max_bodies_bytes": 1})


def test_errors_name_flags_of_the_running_verb_alone() -> None:
    for arguments, said, named in (
        (["transcribe", "a"], "thinker_max_new_tokens is 0.", "--max-new-tokens is 0."),
        (["transcribe", "a"], "max_concurrency is 0.", "--concurrency is 0."),
        (["transcribe", "a"], "talker_top_p is 2.", None),
        (["speak", "a"], "thinker_max_new_tokens is 0.", "--thinker-max-new-tokens is 0."),
        (["compile", "--out", "a"], "prompt_buckets has 3.", "--buckets has 3."),
        (["compile", "--out", "a"], "chunk_frames has 3.", "--chunk-frames has 3."),
        (["serve"], "chunk_frames has 3.", None),
        (["speak", "a"], "tool_choice needs tools.", None),
        (["doctor"], "max_body_bytes is 1.", None),
    ):
        assert with_flags(said, make_parser().parse_args(arguments).verb) == (named or said)


FULL = "qwen3-omni-neuron: No space left on device. Free space, or write elsewhere.\n"


@pytest.mark.parametrize("arguments", ["--help", "doctor", "say hello --out - --quiet"])
def test_an_output_that_takes_no_more_ends_a_verb_without_a_traceback(arguments) -> None:
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, ended in ((write, (ExitStatus.UNREAD, "")), (full, (ExitStatus.FAILED, FULL))):
        done = subprocess.run(
            [sys.executable, "-m", "qwen3_omni_neuron", *arguments.split()],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(output)
        assert (done.returncode, done.stderr) == ended


INTERRUPTED = """
import os, sys
module, sys.argv[1:] = sys.argv[1], ["speak", "hello"]
sys.addaudithook(lambda *a: a[0] == "import" and a[1][0] == module and os.kill(os.getpid(), 2))
from {} import {} as run
run()
"""


@pytest.mark.parametrize("module", ["argparse", "qwen3_omni_neuron.cli", "qwen3_omni_neuron.api"])
def test_ctrl_c_during_an_import_ends_a_verb_without_a_traceback(module, tmp_path) -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (entry,) = re.findall(r'^qwen3-omni-neuron = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    words = [sys.executable, "-c", INTERRUPTED.format(*entry), module]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (-signal.SIGINT, ExitStatus.INTERRUPTED)
    assert "Traceback" not in done.stderr


def run_without_torch(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"""
import sys
sys.modules["torch"] = None  # so that its import fails
{before}
from qwen3_omni_neuron.cli import main
sys.exit(main({arguments!r}))
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_files_that_are_not_there_are_told_without_torch(tmp_path) -> None:
    done = run_without_torch("transcribe", str(tmp_path / "nofile.wav"), str(tmp_path))
    first, second = done.stderr.splitlines()
    assert "nofile.wav: the file does not exist" in first
    assert done.returncode == ExitStatus.FAILED and str(tmp_path) in second


def test_a_model_that_is_not_there_is_told_without_torch() -> None:
    for words in ("speak hi", "say hi", f"transcribe {QUESTION_WAV}", "serve", "verify"):
        done = run_without_torch(*words.split(), "--model", "nope")
        assert done.stderr.startswith("qwen3-omni-neuron: nope does not exist. --model must be")
        assert done.returncode == ExitStatus.FAILED


def test_a_hub_that_is_not_reached_is_told_in_a_sentence_with_its_cause(
    monkeypatch, capsys
) -> None:
    def download(*_: Any, **__: Any) -> None:
        cause = ConnectionError("[Errno -2] Name or service not known")
        raise OSError("Got: ConnectError\nAn error happened. Please try again.") from cause

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert main(["say", "hi", "--out", "-", "--model", "a/b"]) == ExitStatus.FAILED
    cause = "could not be fetched from the hub: [Errno -2] Name or service not known. Check the id"
    assert f"a/b is not a local folder, and {cause}" in capsys.readouterr().err


def test_a_player_that_is_not_there_is_told_without_torch() -> None:
    none = 'import os; os.environ["PATH"] = ""'
    done = run_without_torch("speak", "hi", "--play", before=none)
    assert done.stderr.startswith("qwen3-omni-neuron: no player found")
    assert done.returncode == ExitStatus.FAILED


def test_a_compile_for_neuron_asks_for_its_sdk_before_anything_else(tmp_path, capsys) -> None:
    """The checkpoint is not looked at, let alone downloaded, and no folder is made."""
    for target, said in (
        ("torchneuron", "target torchneuron needs TorchNeuron"),
        ("neuron", "target neuron needs torch_neuronx"),
    ):
        tree = tmp_path / "tree"
        words = ["compile", "--model", "/nowhere", "--target", target, "--out", str(tree)]
        assert main(words) == ExitStatus.FAILED
        assert said in capsys.readouterr().err
        assert not tree.exists()


def test_a_tree_that_is_none_is_told_before_the_hub_is_asked(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(Server, "run", lambda server: server._load() and 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (
        "speak hi --out -",
        "say hi --out -",
        f"transcribe {QUESTION_WAV}",
        "verify",
        "serve",
    ):
        for tree, said in (
            (tmp_path / "typo", "typo is not a folder. Set --compiled to"),
            (empty, "empty is not a complete compiled tree: it has no manifest.json"),
        ):
            where = ["--model", "Qwen/Qwen3-Omni-30B-A3B-Instruct", "--compiled", str(tree)]
            assert main([*words.split(), *where]) == ExitStatus.FAILED
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("script", ["all", *MODELS])
def test_a_script_compiles_one_model_for_a_trn2_at_tp_8(script, monkeypatch) -> None:
    asked: list[Any] = []

    def compile_tree(*given: Any) -> Outcome:
        asked.append(given)
        return Outcome({}, (), {})

    monkeypatch.setattr(compile_verb, "compile_tree", compile_tree)
    monkeypatch.setitem(TARGETS, "torchneuron", replace(TORCHNEURON, require=lambda: None))
    words = [f"compile/{script}.py", "--model", str(SPEAKING_CHECKPOINT), "--out", "tree"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        runpy.run_path(str(REPOSITORY / "compile" / f"{script}.py"), run_name="__main__")
    ((plan, _, _, only, _),) = asked
    degrees = "thinker=8,talker=8,predictor=1,vocoder=1,encoders=8"
    assert (plan.target, str(plan.tp)) == ("torchneuron", degrees)
    assert only == ([] if script == "all" else [script])


def test_inspect_of_neither_a_tree_nor_a_checkpoint_says_so(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for name, said in (
        (
            "",
            "has neither manifest.json, as a compiled tree, nor config.json, as a checkpoint. Name",
        ),
        ("file", "is a file. Name the folder that compile wrote as --out, or a checkpoint"),
        ("nothing/here/at/all", "does not exist. Name the folder that compile wrote as --out"),
    ):
        assert main(["inspect", str(tmp_path / name)]) == ExitStatus.FAILED
        assert f"{tmp_path / name} {said}" in capsys.readouterr().err
