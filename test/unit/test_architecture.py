"""The layers, read from the imports: which module may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from testing.imports import NAME, PACKAGE, ROOT, imports, layer, module_parts, package_files, room
from testing.subprocesses import run_python

FILES = package_files()


def imports_of(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name of a file with each name that it imports."""
    for file in files:
        for name in imports(file):
            yield str(file.relative_to(PACKAGE)), name


def test_imports_run_one_way() -> None:
    for file in FILES:
        own = room(module_parts(file))
        for name in imports(file):
            if name.split(".")[0] == NAME:
                other = room(tuple(name.split(".")[1:]))
                allowed = other == own or layer(other) < layer(own)
                assert allowed, f"{file}: {own} imports {other}, which is beside or above it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for file in FILES:
        own = ".".join((NAME, *module_parts(file))).removesuffix(".__init__")
        graph[own] = {n for n in imports(file) if n.startswith(NAME)}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name in done:
            return
        for other in graph.get(name, set()):
            visit(other, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_nothing_but_neuron_imports_neuron() -> None:
    sdk = {"torch_neuronx", "neuronx_distributed", "neuronx_distributed_inference"}
    others = [file for file in FILES if room(module_parts(file)) != "neuron"]
    for file, name in imports_of(others):
        assert name.split(".")[0] not in sdk, file


def test_rooms_do_not_know_each_other() -> None:
    """The runtime no models, OpenAI's API no endpoint, and an engine not whose process it is in."""
    for files, unknown in (
        ("runtime/*.py", ("torch.nn", "transformers", f"{NAME}.model", f"{NAME}.cpu")),
        ("serving/openai/*.py", (f"{NAME}.serving.endpoints",)),
        ("cpu/**/*.py", (f"{NAME}.engines.process",)),
    ):
        for file, name in imports_of(PACKAGE.glob(files)):
            assert name == f"{NAME}.model.config" or not name.startswith(unknown), file


SERVING = [
    file
    for file in sorted((PACKAGE / "serving").rglob("*.py"))
    if "fleet" not in module_parts(file)
]


def test_the_server_knows_the_public_api_alone() -> None:
    public = {"__init__", "api", "errors", "events", "options"}
    public |= {"helpers", "serving", "session", "sound", "transcription"}
    # The type of what `stream` returns, a session's turns, a client's playback, and a process's
    # memory; the text of a call; the mel features that the judge of a turn's end hears; windows of
    # sound that are transcribed; the format of stored conversations; the fields of media items,
    # their sizes, and the room that they share.
    modules = ("runtime.stream", "prompt.turns", "runtime.schedule", "engines.process.heap")
    modules += ("runtime.stop_strings", "prompt.media.windows")
    modules += ("prompt.media.log_mel", "prompt.stored", "prompt.media.fields")
    modules += ("prompt.media.pixels", "prompt.pauses")
    known = {f"{NAME}.{name}" for name in modules}
    for file, name in imports_of(SERVING):
        if name.startswith(NAME) and name not in known:
            assert room(tuple(name.split(".")[1:])) in public, file


def test_one_entry_of_the_table_of_targets_alone_names_nxdi() -> None:
    """Its folder can then be deleted in one commit, when its SDK ends."""
    folder = PACKAGE / "neuron" / "nxdi"
    lines = [
        line
        for file in FILES
        if folder not in file.parents
        for line in file.read_text(encoding="utf-8").splitlines()
        if "neuron.nxdi" in line or "neuron/nxdi" in line
    ]
    assert len(lines) == 1


def test_a_process_knows_nothing_of_engines() -> None:
    known = ("errors", "engines.process.")
    for file, name in imports_of((PACKAGE / "engines" / "process").glob("*.py")):
        if name.startswith(NAME):
            assert name.removeprefix(f"{NAME}.").startswith(known), file


def test_readers_of_media_know_no_conversations() -> None:
    """Processes that decode media import them without templates, tokenizers and turns."""
    for file, name in imports_of((PACKAGE / "prompt" / "media").glob("*.py")):
        if name.startswith(f"{NAME}.prompt."):
            assert name.startswith(f"{NAME}.prompt.media"), file


# They write the references that `verify` compares with, and are imported for nothing else.
ORACLE = [PACKAGE / "verification" / name for name in ("oracle.py", "write.py")]
OWN = [file for file in FILES if file not in ORACLE]


def test_no_generate_of_another_library() -> None:
    for file in OWN:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "generate", file


def test_transformers_is_the_oracle_alone() -> None:
    """Importing it takes longer than a whole reply of the shipped checkpoint."""
    for file, name in imports_of(OWN):
        assert name.split(".")[0] != "transformers", file


def test_only_who_writes_a_reference_imports_the_oracle() -> None:
    modules = {f"{NAME}.verification.{file.stem}" for file in ORACLE}
    users = [file.relative_to(PACKAGE).as_posix() for file in OWN if imports(file) & modules]
    assert users == ["cli/verify.py"]


# Tests of benchmarks. All others are of the product, and run where there is no bench/, except that
# tests of graphs use bench.trn2: it counts what a graph makes its compiler do.
OF_BENCHMARKS = ("bench", "test_replay", "test_vs_openvino")


def test_only_tests_of_benchmarks_import_them() -> None:
    tests = [*(ROOT / "test").rglob("*.py"), *(ROOT / "testing").rglob("*.py")]
    assert len(tests) > 200
    for file in tests:
        if not any(name in file.stem for name in OF_BENCHMARKS):
            names = {name for name in imports(file) if name.split(".")[0] == "bench"}
            assert all(name.startswith("bench.trn2") for name in names), (
                f"{file} imports a benchmark"
            )


def test_another_library_is_measured_without_the_package() -> None:
    peers = "bench.peers.llama, bench.peers.openvino"
    code = f"import sys; sys.modules[{NAME!r}] = None; import {peers}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_planning_and_the_runner_need_no_torch() -> None:
    """Each graph's process imports them, and imports torch only where its target does."""
    script = (
        f"import {NAME}.compilation.worker, {NAME}.compilation.runner, "
        f"{NAME}.compilation.loading, sys; "
        f"list({NAME}.compilation.loading.TARGETS.values()); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert run_python("-c", script).strip() == "[]"


def test_only_its_own_table_names_a_target() -> None:
    """The table is in `loading`; a target's entry and its engines are in a room of its own.

    verification rounds the reference's weights as the CPU does.
    """
    for file in FILES:
        own = room(module_parts(file))
        rooms = {room(tuple(n.split(".")[1:])) for n in imports(file) if n.startswith(NAME)}
        if own not in ("cli", "cpu", "neuron", "verification"):
            assert not rooms & {"cpu", "neuron"}, f"{own} knows a target: {rooms}"
