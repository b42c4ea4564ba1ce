"""A library that does not belong to these sources is refused."""

import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.installed import MismatchError, find_library, load_library
from qwen3_omni_neuron.cpu.native.sources import source_digest
from qwen3_omni_neuron.model.config import OmniConfig
from testing.native_library import needs_c
from testing.native_modules import frames, native_predictor, talker_config
from testing.subprocesses import run_python

pytestmark = needs_c
LIMITS = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 12}


NATIVE = Path(installed.__file__).parent


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has no single {old!r} to change"
    file.write_text(text.replace(old, new))


FLAGS = ("-fPIC", "-pthread", "-Wno-psabi")


def compile_library(folder: Path) -> Path:
    """Compile what has no object yet in a folder, with its digest, and link it all, as setup.py."""
    library = folder / "_library.so"
    macro = f"-DSOURCE_DIGEST={source_digest(folder)}"
    sources = [c for c in folder.glob("*.c") if not c.with_suffix(".o").exists()]
    objects = folder.glob("*.o")
    subprocess.run(
        ["cc", "-shared", *FLAGS, macro, "-o", library, *sources, *objects, "-lm"], check=True
    )
    return library


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the objects of all sources but library.c, which has the digest alone."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler, so no other library can be made")
    folder = tmp_path_factory.mktemp("objects")
    files = [file for file in NATIVE.glob("*.c") if file.name != "library.c"]
    subprocess.run(["cc", *FLAGS, "-c", *files], check=True, cwd=folder)
    return folder


@pytest.fixture
def sources(objects: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the C sources and their objects."""
    for file in (*NATIVE.glob("*.c"), *NATIVE.glob("*.h"), *objects.glob("*.o")):
        shutil.copy(file, tmp_path)
    return tmp_path


def of_another_layout(sources: Path) -> Path:
    old = "    int64_t threads;          /* that a call may use */\n} Stepper;"
    change(sources / "library.h", old, old.replace("threads;", "more, threads;"))
    return compile_library(sources)


def of_older_sources(sources: Path) -> Path:
    """An update without a compiler: sources that do something else, the same declarations."""
    library = compile_library(sources)
    change(sources / "library.h", "DONE = 0", "DONE = 0 /* new */")
    return library


def without_a_digest(sources: Path) -> Path:
    for file in sources.iterdir():
        file.unlink()
    (sources / "old.c").write_text("int decode_step(void) { return 0; }\n")
    return compile_library(sources)


def not_a_library(sources: Path) -> Path:
    path = sources / "_library.so"
    path.write_text("compiled for another machine")
    return path


OTHER_DECLARATIONS = "sources of digest [0-9a-f]{15}, and the Python beside it is for [0-9a-f]{15};"
MISMATCHES: dict[Callable[[Path], Path], str] = {
    of_another_layout: OTHER_DECLARATIONS,
    of_older_sources: "sources of digest [0-9a-f]{15}, and those beside it have [0-9a-f]{15};",
    without_a_digest: "can't be loaded .*source_digest",
    not_a_library: "can't be loaded",
}


@pytest.mark.parametrize("mismatched", MISMATCHES, ids=lambda made: made.__name__)
def test_a_library_of_other_sources_is_refused(
    sources: Path,
    mismatched: Callable[[Path], Path],
    install: Callable[[Path | None], None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With one warning that says what differs and what to do; `doctor` says it, too."""
    install(mismatched(sources))
    assert find_library() is None
    assert find_library() is None
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    for part in (str(sources / "_library.so"), "torch computes the same", "pip install -e ."):
        assert part in record.getMessage()
    expected = re.compile(MISMATCHES[mismatched])
    assert expected.search(record.getMessage())
    assert cli.main(["doctor"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "steps in C" in line)
    assert "compiled, not used" in row
    assert expected.search(row)
    assert "pip install --force-reinstall" in row


def test_a_library_of_these_sources_is_accepted(
    config: OmniConfig, sources: Path, install: Callable[[Path | None], None]
) -> None:
    """Also where an installation was stripped of its sources: the declarations have the digest."""
    library = compile_library(sources)
    load_library(library)
    for file in (*sources.glob("*.c"), *sources.glob("*.h")):
        file.unlink()
    install(library)
    c = talker_config(config)
    accepted = find_library()
    assert accepted is not None
    native_predictor(c, accepted)(*frames(c, 1)[:2])
    stripped_of_another_layout = sources / "other"
    shutil.copytree(NATIVE, stripped_of_another_layout, ignore=shutil.ignore_patterns("*.so"))
    for file in sources.glob("*.o"):
        shutil.copy(file, stripped_of_another_layout)
    other = shutil.move(of_another_layout(stripped_of_another_layout), sources / "other.so")
    with pytest.raises(MismatchError, match=OTHER_DECLARATIONS):
        load_library(other)


DROPPED = """
import gc, torch
from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.native.binding import pack_in_c

library = installed.load_library(installed.library_path())
library.grow_pool(4)
linear = torch.nn.Linear(64, 4000, bias=False)  # shared by the threads of the pool
linear.weight.data = pack_in_c(linear.weight.data, library)
native = NativeLinear(linear, library, 4)
native(torch.randn(3, 64))
del library
gc.collect()
native(torch.randn(3, 64))
"""


def test_a_library_stays_in_memory_when_it_is_dropped() -> None:
    """The threads of its pool run in it, and functions of it are held."""
    run_python("-c", DROPPED)
