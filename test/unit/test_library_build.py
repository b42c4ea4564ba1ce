"""How setup.py compiles the library, with a compiler that only notes its calls."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing.imports import PACKAGE, ROOT

COMPILER = f"""#!{sys.executable}
import sys
from pathlib import Path

if Path("broken").exists():
    sys.exit("an error")
words = sys.argv[1:]
out = Path(words[words.index("-o") + 1])
Path("calls").open("a").write(out.name + "\\n")
macros = [word for word in words if word.startswith("-DSOURCE_DIGEST=")]
if macros:
    out.write_bytes(int(macros[0].partition("=")[2]).to_bytes(8, sys.byteorder))
else:
    out.write_bytes(b"".join(Path(word).read_bytes() for word in words if word.endswith(".o")))
"""
NATIVE = PACKAGE / "cpu" / "native"


class Tree:
    """A tree with setup.py and one C file."""

    def __init__(self, folder: Path):
        self.folder, self.native = folder, folder / NATIVE.relative_to(ROOT)
        self.native.mkdir(parents=True)
        shutil.copy(ROOT / "setup.py", folder)
        for name in ("library.c", "library.h", "sources.py"):
            shutil.copy(NATIVE / name, self.native)
        (folder / "compiler").write_text(COMPILER)
        (folder / "compiler").chmod(0o755)

    def build(self) -> list[str]:
        """Build, and return the names of the files that the compiler made."""
        compiler = str(self.folder / "compiler")
        calls = self.folder / "calls"
        calls.write_text("")
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext"],
            cwd=self.folder,
            env={**os.environ, "CC": compiler, "LDSHARED": compiler},
            check=True,
            capture_output=True,
        )
        return calls.read_text().split()

    def libraries(self) -> list[Path]:
        return list(self.folder.glob("build/lib*/**/_library*"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tree that was built once."""
    tree = Tree(tmp_path)
    assert tree.build() == ["library.o", "_library.abi3.so"]
    return tree


def test_the_library_is_compiled_again_only_from_other_sources(tree: Tree) -> None:
    """Whatever their time stamps are."""
    assert tree.build() == []
    source = tree.native / "library.c"
    source.write_text(source.read_text() + "\n/* changed */\n")
    os.utime(source, (1, 1))
    assert tree.build() == ["library.o", "_library.abi3.so"]
    assert len(tree.libraries()) == 1


def test_a_compiler_that_fails_leaves_no_library_of_other_sources(tree: Tree) -> None:
    (tree.folder / "broken").touch()
    assert tree.build() == []
    assert len(tree.libraries()) == 1  # that of these sources
    (tree.native / "library.h").write_text((NATIVE / "library.h").read_text() + "\n")
    assert tree.build() == []
    assert tree.libraries() == []
