"""The parser: help, examples, errors that name a flag, completion; and pipes that are closed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3_omni_neuron.cli import main, make_parser
from qwen3_omni_neuron.cli.completion import SHELLS
from qwen3_omni_neuron.cli.parsing import with_flags
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.errors import ExitStatus, OptionError
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.serving.fleet.settings import FleetSettings
from testing.command_examples import examples, verbs
from testing.media_cases import QUESTION_WAV

VERBS = verbs()


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_examples_that_it_takes(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in examples(verb):
        assert words[0] == verb
        assert make_parser().parse_args(words).run is not None
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    shown = capsys.readouterr().out
    usage = shown.split("\n\n")[0]
    assert usage.startswith(f"usage: qwen3-omni-neuron {verb} ") and len(usage) < 300
    assert "examples:\n  qwen3-omni-neuron " in shown


def test_without_a_verb_it_shows_its_help_and_with_version_its_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == ExitStatus.OK
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb}" in shown
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"qwen3-omni-neuron {PACKAGE_VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["speak", "a", "--spaeker", "b"],
            "unknown arguments: --spaeker b. Did you mean --speaker?",
        ),
        (["speak", "a", "--colour=b"], "unknown argument: --colour=b"),
        (["say", "a", "b"], "unknown argument: b"),
        (
            ["speak", "a", "--thinker-max-new-tokens", "0"],
            "argument --thinker-max-new-tokens: must be an integer of 1 or more, got '0'",
        ),
        (["speak", "--talker-top-p", "a"], "argument --talker-top-p: must be a number from"),
        (
            ["speak", "--placement", "here"],
            "argument --placement: must be shared or split, got 'here'",
        ),
        (
            ["transcribe", "a", "--max-new-tokens", "0"],
            "argument --max-new-tokens: must be an integer",
        ),
    ],
)
def test_a_wrong_argument_is_told_in_a_line_that_names_its_flag(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == ExitStatus.WRONG_COMMAND_LINE
    prefix = f"qwen3-omni-neuron {arguments[0]}"
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{prefix}: {said}")
    assert second == f"See: {prefix} --help"


@pytest.mark.parametrize(("verb", "hint"), [("speek", ". Did you mean speak?"), ("qqqq", ".")])
def test_a_wrong_verb_is_told_with_the_one_that_was_meant(
    verb: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb])
    assert ended.value.code == ExitStatus.WRONG_COMMAND_LINE
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"qwen3-omni-neuron: unknown command {verb!r}{hint}"
    assert second == "See: qwen3-omni-neuron --help"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "tree"], "push was removed: use `aws s3 sync`"),
        (["compile", "--resume"], "--resume was removed: leave it out"),
        (["serve", "--max-bodies-bytes", "1"], "--max-bodies-bytes was removed: use --max-held-b"),
    ],
)
def test_what_was_removed_is_refused_with_what_to_use_instead(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == ExitStatus.WRONG_COMMAND_LINE
    assert f": {said}" in capsys.readouterr().err.splitlines()[0]
    with pytest.raises(OptionError, match="max_bodies_bytes was removed: use max_held_bytes"):
        LoadOptions.parse({"max_bodies_bytes": 1})
    with pytest.raises(OptionError, match="max_bodies_bytes was removed: use max_held_bytes"):
        FleetSettings.parse({"max_bodies_bytes": 1})


@pytest.mark.parametrize(
    ("arguments", "said", "named"),
    [
        (["transcribe", "a"], "thinker_max_new_tokens is 0.", "--max-new-tokens is 0."),
        (["transcribe", "a"], "max_concurrency is 0.", "--concurrency is 0."),
        (["transcribe", "a"], "talker_top_p is 2.", None),
        (["speak", "a"], "thinker_max_new_tokens is 0.", "--thinker-max-new-tokens is 0."),
        (["compile", "--out", "a"], "prompt_buckets has 3.", "--buckets has 3."),
        (["compile", "--out", "a"], "chunk_frames has 3.", "--chunk-frames has 3."),
        (["serve"], "chunk_frames has 3.", None),
        (["speak", "a"], "tool_choice needs tools.", None),
        (["doctor"], "max_body_bytes is 1.", None),
    ],
)
def test_errors_name_flags_of_the_running_verb_alone(
    arguments: list[str], said: str, named: str | None
) -> None:
    assert with_flags(said, make_parser().parse_args(arguments).verb) == (named or said)


@pytest.mark.parametrize("arguments", [["--help"], ["speak", "--help"], ["doctor"]])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_reader_that_leaves_ends_a_verb_without_a_word(
    arguments: list[str], buffered: bool
) -> None:
    """With the status of a program that SIGPIPE ended."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "qwen3_omni_neuron.cli", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (ExitStatus.UNREAD, "")


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


def test_files_that_are_not_there_are_told_without_torch(tmp_path: Path) -> None:
    done = run_without_torch("transcribe", str(tmp_path / "nofile.wav"), str(tmp_path))
    first, second = done.stderr.splitlines()
    assert "nofile.wav: the file does not exist" in first
    assert done.returncode == ExitStatus.FAILED and str(tmp_path) in second


@pytest.mark.parametrize(
    "arguments",
    [
        ["speak", "hi"],
        ["say", "hi"],
        ["transcribe", str(QUESTION_WAV)],
        ["serve"],
        ["verify"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_model_that_is_not_there_is_told_without_torch(arguments: list[str]) -> None:
    done = run_without_torch(*arguments, "--model", "nope")
    assert done.stderr.startswith("qwen3-omni-neuron: nope does not exist. --model must be")
    assert done.returncode == ExitStatus.FAILED


def test_a_player_that_is_not_there_is_told_without_torch() -> None:
    none = 'import os; os.environ["PATH"] = ""'
    done = run_without_torch("speak", "hi", "--play", before=none)
    assert done.stderr.startswith("qwen3-omni-neuron: no player found")
    assert done.returncode == ExitStatus.FAILED


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shells_completion_has_verbs_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*VERBS, "thinker-max-new-tokens", "max-realtime-sessions"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
    if shell == "bash":
        for typed, completed in (
            ("tran", "transcribe"),
            ("speak --first-chunk ea", "early"),
            ("serve --max-realtime-ses", "--max-realtime-sessions"),
        ):
            words = ["qwen3-omni-neuron", *typed.split()]
            ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            ask += "_shtab_qwen3_omni_neuron; echo ${COMPREPLY[@]}"
            done = subprocess.run(
                ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
            )
            assert done.stdout.split() == [completed]


def test_without_shtab_completion_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == ExitStatus.FAILED
    assert "pip install 'qwen3-omni-neuron[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torchneuron", "target torchneuron needs TorchNeuron"),
        ("neuron", "target neuron needs torch_neuronx"),
    ],
)
def test_a_compile_for_neuron_asks_for_its_sdk_before_anything_else(
    target: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is not looked at, let alone downloaded, and no folder is made."""
    tree = tmp_path / "tree"
    words = ["compile", "--model", "/nowhere", "--target", target, "--out", str(tree)]
    assert main(words) == ExitStatus.FAILED
    assert said in capsys.readouterr().err
    assert not tree.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "",
            "has neither manifest.json, as a compiled tree, nor config.json, as a checkpoint. Name",
        ),
        ("file", "is a file. Name the folder that compile wrote as --out, or a checkpoint"),
        ("nothing/here/at/all", "does not exist. Name the folder that compile wrote as --out"),
    ],
)
def test_inspect_of_neither_a_tree_nor_a_checkpoint_says_so(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["inspect", str(tmp_path / name)]) == ExitStatus.FAILED
    assert f"{tmp_path / name} {said}" in capsys.readouterr().err
