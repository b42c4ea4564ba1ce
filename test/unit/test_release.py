"""A release: its tag is its version, and its archives are the same from every build."""

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from testing import wheels
from testing.imports import ROOT


def test_a_tag_has_to_name_the_version(capsys) -> None:
    assert wheels.main(["--tag", f"v{PACKAGE_VERSION}"]) == 0
    assert capsys.readouterr().err == ""
    for tag in (PACKAGE_VERSION, f"v{PACKAGE_VERSION}.post1", "refs/tags/v0"):
        assert wheels.main(["--tag", tag]) == 1
        assert f"The tag is {tag} and the version {PACKAGE_VERSION}" in capsys.readouterr().err


def test_the_changelog_begins_with_this_version_or_what_follows_it() -> None:
    """A version that users have is followed by how to come from the one before."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *_ = versions = re.findall(r"^## (\S+)", text, re.MULTILINE)
    released = versions[1] if first == "Unreleased" else first
    assert released == PACKAGE_VERSION
    assert "\n### Upgrading from " in text.split(f"\n## {PACKAGE_VERSION} ")[1]


def packed(path: Path, names: Sequence[str], seconds: int) -> Path:
    """Write a .tar.gz as a user does: of his name, at his time."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uid, member.uname = seconds, seconds, f"user{seconds}"
            member.mode = 0o600 | (0o177 & -(name == "run"))
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_a_source_archive_has_nothing_of_the_build_that_made_it(tmp_path) -> None:
    """Neither times nor owners nor the order of files; bytes and the right to run are kept."""
    names = ["b", "a/c", "run"]
    one, two = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    wheels.repack(packed(tmp_path / "x", names, 7), one, seconds=10**9)
    wheels.repack(packed(tmp_path / "y", names[::-1], 8), two, seconds=10**9)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes()[4:8] == (10**9).to_bytes(4, "little")  # the time that gzip keeps
    with tarfile.open(one) as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == ["a/c", "b", "run"]
        for member in members:
            assert archive.extractfile(member).read() == member.name.encode()
            assert member.mode == (0o755 if member.name == "run" else 0o644)
            assert member.mtime == 10**9


def test_the_workflow_publishes_what_was_built_and_tried() -> None:
    """The tag is looked at first and tests pass; only the last job may publish, without a token."""
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    jobs: dict[str, Any] = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["needs"] == ["test", "speak"]
    assert jobs["speak"]["needs"] == "build"
    assert [name for name in jobs if "permissions" in jobs[name]] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    runs = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert runs == [
        'PYTHONPATH=src python -m testing.wheels --tag "$GITHUB_REF_NAME"',
        "make wheels",
    ]
    assert jobs["test"]["steps"][-1]["run"] == "make test-all test-hlo"
    assert re.search(r"^wheels:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert "secrets." not in text


def test_every_test_that_make_names_is_there() -> None:
    """Pytest runs no test at all where one of the files is missing."""
    plan = ["make", "--dry-run", "check", "test-oracle", "test-import", "test-ray", "test-clients"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(plan, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    named = [word.partition("::") for word in done.stdout.split() if word.startswith("test/")]
    assert len(named) > 30
    for path, _, function in named:
        assert (ROOT / path).exists(), path
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), function
