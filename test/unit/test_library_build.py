"""When setup.py compiles the library, with a compiler that only notes its calls."""

import os
import shutil
import subprocess
import sys

from testing.imports import PACKAGE, ROOT

NATIVE = PACKAGE / "cpu" / "native"
COMPILER = f"""#!{sys.executable} -IS
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
COMPILED = ["library.o", "_library.abi3.so"]


def test_the_library_is_compiled_only_from_other_sources_and_none_of_others_is_left(
    tmp_path,
) -> None:
    """Whatever their time stamps are, and where the compiler fails."""
    native = tmp_path / NATIVE.relative_to(ROOT)
    native.mkdir(parents=True)
    for file in (
        ROOT / "setup.py",
        *(NATIVE / f for f in ("library.c", "library.h", "sources.py")),
    ):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    compiler, source = tmp_path / "compiler", native / "library.c"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)

    def build() -> list[str]:
        """Build, and return the names of the files that the compiler made."""
        calls = tmp_path / "calls"
        calls.write_text("")
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext"],
            cwd=tmp_path,
            env={**os.environ, "CC": str(compiler), "LDSHARED": str(compiler)},
            check=True,
            capture_output=True,
        )
        return calls.read_text().split()

    def change() -> None:
        source.write_text(source.read_text() + "\n")
        os.utime(source, (1, 1))

    assert build() == COMPILED
    assert build() == []
    change()
    assert build() == COMPILED
    (library,) = tmp_path.glob("build/lib*/**/_library*")
    change()
    (tmp_path / "broken").touch()
    assert build() == []
    assert not library.exists()
