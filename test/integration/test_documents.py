"""Commands and Python of the documents: run, or refused as the page says, or at least parsed.

A comment before a block says that it can't run here: after `<!-- not run here: REASON -->` the
commands are only parsed, by the real parser; after `<!-- refused here: MESSAGE -->` they are run,
and fail with that message. After `<!-- served here: WHERE -->` they are run while a server answers.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni, cli
from qwen3_omni_neuron.errors import ExitStatus
from testing.imports import ROOT
from testing.made_videos import make_video
from testing.names import index
from testing.specs import compiled_here
from testing.torchneuron.leaner import write_leaner_checkpoint

DOCUMENTS = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md")
    for file in ROOT.glob(pattern)
)
BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>not run|refused|served) here: (?P<said>.*?) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
# A plan of few sizes: the default one takes a while to count.
SMALL = ["--context-length", "64", "--buckets", "16", "--decode-buckets", "64"]
SMALL += ["--patch-buckets", "64", "--chunk-frames", "4", "--max-concurrency", "1", "--tp", "1"]
SERVER_URL = "http://127.0.0.1:8000"
REQUIREMENTS = ROOT / "requirements"
# A pin of pip, or of npm: the package and its version.
PINNED = re.compile(r'^"?([\w@/.-]+)(?:\[\w+\])?==([\d.]+)$|"([\w@/-]+)": "([\d.]+)"', re.MULTILINE)
BESIDE = ("zod", "ws", "@langchain/core")
# Programs of others, which are not run here.
FOREIGN = {"pip", "source", "git", "curl", "openssl", "chmod", "evalscope", "aws", "hf", "shtab"}
SPEECH_FILES = {"README.md": ("words.wav", "answer.wav"), "docs/trn2.md": ("story.wav",)}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    mark: "", "not run", "refused" or "served"; said: why, the message, or where.
    """

    language: str
    text: str
    mark: str
    said: str


def blocks(document: str, language: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines()]
        found.append(
            Block(match["language"], "\n".join(lines), match["mark"] or "", match["said"] or "")
        )
    return [block for block in found if block.language == language]


def commands(document: str) -> Iterator[tuple[list[str], Block]]:
    """Every command of a document's shell blocks, without what its output goes into."""
    for block in blocks(document, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                end = next((i for i, word in enumerate(words) if word in ("|", ">")), None)
                yield words[:end], block


def ours(document: str) -> list[tuple[list[str], Block]]:
    found = commands(document)
    return [(words[1:], block) for words, block in found if words[0] == "qwen3-omni-neuron"]


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document, tmp_path) -> None:
    """A document's blocks run one after the other, in one process, in a folder of their own."""
    shown = blocks(document, "python")
    for block in shown:
        compile(block.text, document, "exec")
    script = "\n".join(block.text for block in shown if block.mark not in ("not run", "served"))
    if not script:
        return
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if document == "docs/python.md":
        said = re.findall(r"^ *print\(.*\)  # ([^:\n]+)", script, re.MULTILINE)
        assert len(said) > 20
        assert [line for line in said if line not in done.stdout.splitlines()] == []
        assert [file.name for file in tmp_path.iterdir()] == ["examples"]
    if document == "README.md":
        assert_prints_what_it_says(done.stdout)


def assert_prints_what_it_says(printed: str) -> None:
    frames, groups = map(int, re.search(r"^\((\d+), (\d+)\)$", printed, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert printed.startswith("eight stop\n")
    assert 0 < frames <= 99
    assert groups == 16
    assert f"({frames * 1920 - 555},) 24000" in printed
    assert re.search(r"^\d+ frames of speech$", printed, re.MULTILINE)


@pytest.fixture(scope="module")
def leaner(tmp_path_factory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if ours(name)])
def test_our_commands_run(
    document,
    checkpoint,
    leaner,
    tmp_path,
    monkeypatch,
    capsysbinary,  # one of them plays samples to stdout
) -> None:
    """Over a tiny checkpoint in the place of the released one, with few tokens."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    Path("clip.mp4").write_bytes(make_video(audio="aac"))
    for words, block in ours(document):
        cli.make_parser().parse_args(words)
        if block.mark == "not run":
            continue
        arguments = [str(checkpoint) if word.startswith("Qwen/") else word for word in words]
        passes = {ExitStatus.OK}
        if words[0] in ("speak", "transcribe"):
            passes.add(ExitStatus.CUT)
        if words[0] == "speak":
            arguments += ["--thinker-max-new-tokens", "3", "--talker-max-new-tokens", "4"]
        elif words[0] == "transcribe":
            arguments += ["--max-new-tokens", "3"]
        elif "--dry-run" in words:
            arguments = [word.replace(str(checkpoint), str(leaner)) for word in arguments]
            arguments += SMALL
        with compiled_here():
            status = cli.main(arguments)
        errors = capsysbinary.readouterr().err.decode()
        if block.mark == "refused":
            passes = {ExitStatus.FAILED}
        assert status in passes, f"{words}\n{errors}"
        assert block.mark != "refused" or block.said in errors
    for speech in SPEECH_FILES.get(document, ()):
        assert (tmp_path / speech).stat().st_size > 44


def test_what_is_shown_of_the_server_runs(tmp_path) -> None:
    """Against a server of the checkpoint that ships, on another port."""
    from testing.http_server import serving, url_of

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = [
        block
        for document in DOCUMENTS
        for language in ("python", "sh")
        for block in blocks(document, language)
        if block.mark == "served"
    ]
    assert {block.language for block in shown} == {"python", "sh"}
    with (
        Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni,
        serving(omni, model_name="speaking_checkpoint") as server,
    ):
        for block in shown:
            assert SERVER_URL in block.text
            text = block.text.replace(SERVER_URL, url_of(server))
            program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-ec"]
            done = subprocess.run(
                [*program, text], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{block.text}\n{done.stderr}"
            assert '"error"' not in done.stdout, f"{block.text}\n{done.stdout}"
            if block.language == "python" and "# eight" in block.text:
                assert done.stdout == "eight\n"
    assert (tmp_path / "answer.wav").stat().st_size > 10_000


def test_the_notebook_runs_and_is_kept_without_its_outputs(tmp_path, monkeypatch) -> None:
    """Each cell shows what its page says: a player, a file, text and speech that arrive."""
    notebook = nbformat.read(ROOT / "examples" / "first_hour.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in cells)
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # not the user's own
        monkeypatch.setenv(folder, str(tmp_path / folder))
    (tmp_path / "sum.wav").symlink_to(ROOT / "examples" / "sum.wav")
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    texts = [re.match("<p>(.*?)</p>", page) for page in pages]
    said = ["five", "eight", *["seven red goodbye"] * 3, None, "eight"]
    assert [text and text[1] for text in texts] == said
    starts = [" autoplay" in page for page in pages]
    assert starts == [text is None for text in said], "`play` alone starts by itself"
    assert all('src="data:audio/wav;base64,UklGR' in page for page in pages)
    assert (tmp_path / "five.mp3").stat().st_size > 1000
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    for line in ("audio=float32 [", "ttft_s=", "text: three\nspeech: ", "assistant three\n"):
        assert line in printed
    assert printed.endswith("user (speech)\nassistant eight\n")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_other_commands_exist(document) -> None:
    """Targets of make, modules, and tests; other people's programs are listed."""
    for words, _ in commands(document):
        plain = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if plain[0] == "make":
            subprocess.run(
                ["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True
            )
        elif plain[:2] == ["python", "-m"]:
            assert plain[2] == "pip" or index().has_dotted(plain[2]), words
        elif plain[:2] == ["python", "-c"]:
            compile(plain[2], document, "exec")
        elif Path(plain[0]).name == "pytest":
            assert (ROOT / plain[1]).exists(), words
        else:
            assert plain[0] in {"qwen3-omni-neuron", *FOREIGN}, words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        if path.startswith("https:"):
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings
            }


def test_readme_is_short_and_its_first_commands_are_make_targets() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
    found = [words[1] for words, _ in commands("README.md") if words[0] == "make"]
    assert found == ["demo", "test", "serve"]


def test_the_versions_that_they_name_are_the_pinned_ones() -> None:
    proof = (ROOT / "docs" / "proof.md").read_text(encoding="utf-8")
    newest = (ROOT / "requirements" / "newest.txt").read_text(encoding="utf-8")
    nxdi = (ROOT / "requirements" / "nxdi-line.txt").read_text(encoding="utf-8")
    assert f"transformers {re.search(r'transformers==(5[.][0-9]+)', newest)[1]}" in proof  # type: ignore[index]
    assert re.search(r"transformers==([\d.]+)", nxdi)[1] in proof  # type: ignore[index]


def test_the_table_of_clients_has_every_environment_and_its_versions() -> None:
    """A package that a client only needs beside it, such as zod, stands in its file alone."""
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in (ROOT / "docs/agent.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and line.count("|") == 7
    ]
    by_environment: dict[str, str] = {}
    for _, version, _, environment, _, _ in rows[2:]:
        by_environment[environment] = f"{by_environment.get(environment, '')} {version}"
    del by_environment["by `make test`"], by_environment["by hand"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^CLIENTS \?= (.*)$", makefile, re.MULTILINE)
    files = {file.stem.removeprefix("clients-"): file for file in REQUIREMENTS.glob("clients-*")}
    assert set(files) == set(listed[1].split()) == set(by_environment)
    for name, file in files.items():
        for pin in PINNED.findall(file.read_text(encoding="utf-8")):
            package, version = filter(None, pin)
            if package not in BESIDE:
                assert package in by_environment[name], (name, package)
                assert version in by_environment[name], (name, package)
    tests = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "test/clients").glob("*.py")
    )
    assert [name for name in files if f'"{name}"' not in tests] == []
    programs = {file.name for file in (ROOT / "testing/clients").iterdir() if file.is_file()}
    programs -= {"microphone.py", "microphone.cjs"}
    assert [name for name in programs if name.removesuffix(".py") not in tests] == []


def test_the_errors_that_trn2_explains_are_in_the_code() -> None:
    """Each quoted message's longest part that the code does not fill in."""
    files = (ROOT / "src").rglob("*.py")
    # Strings that stand side by side are one.
    sources = [re.sub(r'"\s*f?"', "", file.read_text(encoding="utf-8")) for file in files]
    page = (ROOT / "docs" / "trn2.md").read_text(encoding="utf-8")
    table = page.split("\n## When something")[1].split("\n## ")[0]
    filled = r"\.\.\.|\b[NM]\b|prompt rows|neuronx-cc|torch_neuronx|NEURON_\w+"
    for message in re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE):
        fixed = max(re.split(filled, message), key=len).strip()
        assert any(fixed in text for text in sources), message
