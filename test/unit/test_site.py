"""The documentation site's navigation, its page of Python names, and its table of an installation."""

import re
from importlib import metadata

from packaging.requirements import Requirement

import qwen3_omni_neuron
from testing.imports import ROOT

# Pages beside docs/: GitHub shows them where they are.
BESIDE_DOCS = {
    *("README.md", "BENCHMARK.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"),
    "src/qwen3_omni_neuron/speaking_checkpoint/README.md",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_navigation_names_every_page_once_and_nothing_else() -> None:
    navigation = text_of("mkdocs.yml").split("\nnav:\n")[1].split("\n\n")[0]
    named = re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages | BESIDE_DOCS)


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = text_of("docs/python.md")
    for name in qwen3_omni_neuron.__all__:
        assert re.search(rf"\b{name}\b", page), name


def test_the_table_of_an_installation_has_each_requirement() -> None:
    """And nothing else: rows of what these bring in turn name no package."""
    requirements = map(Requirement, metadata.requires("qwen3-omni-neuron") or ())
    needed = {r.name for r in requirements if r.marker is None}
    table = text_of("docs/first-answer.md").split("## What an installation brings")[1]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == needed
