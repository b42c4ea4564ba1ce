"""Navigation of the documentation site, its page of Python names, its table of an installation."""

import re
from importlib import import_module, metadata

from packaging.requirements import Requirement

import qwen3_omni_neuron
from testing.imports import PACKAGE, ROOT

# Pages beside docs/.
BESIDE_DOCS = {
    *("README.md", "SECURITY.md", "BENCHMARK.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    "examples/README.md",
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


def test_every_public_method_has_an_example_on_the_page_of_python() -> None:
    """Examples, which test_documents.py runs, stand after the line that names the method."""
    sections = {}
    for section in text_of("docs/python.md").split("<!-- generated: ")[1:]:
        example = re.search("```python\n(.*?)```", section, re.DOTALL)
        sections.setdefault(section.split()[0], "" if example is None else example[1])
    classes = ("api.Qwen3Omni", "session.Session", "runtime.stream.SpeechStream")
    for path in (*classes, "events.SpeechResult"):
        module, name = path.rsplit(".", 1)
        shown = vars(getattr(import_module(f"{qwen3_omni_neuron.__name__}.{module}"), name))
        fields = shown.get("__dataclass_fields__", {})
        for method in shown:
            if not method.startswith("_") and method not in fields:
                assert re.search(rf"\b{method}\b", sections[f"{path}.{method}"]), (path, method)
    for function in ("api.generate_audio", "transcription.transcribe"):
        assert function.split(".")[-1] in sections[function]
    assert {"options.RequestArguments", "options.LoadArguments"} < {*sections}


def test_the_badges_have_the_versions_and_the_license_of_pyproject() -> None:
    project = text_of("pyproject.toml")
    first, end = re.search(r'requires-python = ">=3.(\d+),<3.(\d+)"', project).groups()  # type: ignore[union-attr]
    versions = f"3.{first} to 3.{int(end) - 1}"
    license_name = re.search(r'license = "(.+)"', project)[1]  # type: ignore[index]
    for file, label, text in (
        ("python", "Python", versions),
        ("license", "License:", license_name),
    ):
        assert f"![{label} {text}](docs/{file}.svg)" in text_of("README.md")
        assert f">{text}</text>" in text_of(f"docs/{file}.svg")


def needed() -> set[str]:
    """The packages that every installation brings."""
    requirements = map(Requirement, metadata.requires("qwen3-omni-neuron") or ())
    return {r.name for r in requirements if r.marker is None}


def test_the_table_of_an_installation_has_each_requirement_and_no_other() -> None:
    table = text_of("docs/first-answer.md").split("## What an installation brings")[1]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == needed()


def test_nothing_is_required_that_serving_alone_imports() -> None:
    serving = {PACKAGE / "serving", PACKAGE / "cli" / "serve.py"}
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        if serving.isdisjoint((file, *file.parents)):
            code = file.read_text(encoding="utf-8")
            imported |= set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    modules = {"pillow": "PIL"}
    assert {modules.get(name, name) for name in needed()} <= imported
