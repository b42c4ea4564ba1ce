"""What README shows, run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from testing.made_videos import make_video

ROOT = Path(__file__).parents[2]
# Of a plan: the default one takes a while to count.
SMALL = ["--context-length", "64", "--buckets", "16", "--decode-buckets", "64"]
SMALL += ["--patch-buckets", "64", "--chunk-frames", "4", "--max-concurrency", "1", "--tp", "1"]
REFUSALS = {
    "compile": "target neuron needs torch_neuronx",
    "speak": "compiled-neuron is no whole compiled tree",
}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """Every `qwen3-omni-neuron` command, without its first word and the player it is piped into."""
    joined = "\n".join(blocks("sh")).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in joined.splitlines()]
    ours = [words[1:] for words in found if words[:1] == ["qwen3-omni-neuron"]]
    return [words[: words.index("|")] if "|" in words else words for words in ours]


def test_the_python_example_runs_and_says_what_it_says() -> None:
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    frames, groups = map(int, re.search(r"^\((\d+), (\d+)\)$", done.stdout, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert done.stdout.startswith("eight stop\n")
    assert 0 < frames <= 99
    assert groups == 16
    assert f"({frames * 1920 - 555},) 24000" in done.stdout
    assert re.search(r"^\d+ frames of speech$", done.stdout, re.MULTILINE)


def test_the_commands_run(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],  # one of them plays samples to stdout
) -> None:
    """Those for a trn2 as far as they go without the SDK."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    shown = commands()
    Path("clip.mp4").write_bytes(make_video(audio="aac"))
    verbs = ["speak", "speak", "speak", "speak", "transcribe", "compile", "inspect", "speak"]
    verbs += ["doctor", "compile", "compile", "speak", "tiny-checkpoint"]
    assert [words[0] for words in shown] == verbs
    for words in shown:
        arguments = [str(checkpoint) if w.startswith("Qwen/") else w for w in words]
        if words[0] == "speak":
            arguments += ["--thinker-max-new-tokens", "3", "--talker-max-new-tokens", "4"]
        elif words[0] == "transcribe":
            arguments += ["--max-new-tokens", "3"]
        elif "--dry-run" in words:
            arguments += SMALL
        refusal = REFUSALS.get("compiled-neuron" in words and words[0])
        assert cli.main(arguments) == (0 if refusal is None else 1)
        if refusal is not None:
            assert refusal in capsysbinary.readouterr().err.decode()
    for speech in ("words.wav", "answer.wav", "story.wav"):
        assert (tmp_path / speech).stat().st_size > 44
    assert (tmp_path / "my-checkpoint" / "config.json").exists()


def test_the_two_commands_are_make_targets() -> None:
    targets = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_versions_it_names_are_the_pinned_ones() -> None:
    newest = (ROOT / "requirements" / "newest.txt").read_text()
    nxdi = (ROOT / "requirements" / "nxdi-line.txt").read_text()
    assert f"transformers {re.search(r'transformers==(5[.][0-9]+)', newest)[1]}" in README  # type: ignore[index]
    assert re.search(r"transformers==([\d.]+)", nxdi)[1] in README  # type: ignore[index]
