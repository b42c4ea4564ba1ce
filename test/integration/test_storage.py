"""Compiled trees on shared storage: pushed, pulled, interrupted, corrupted, by several at once."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.callbacks import Callback
from fsspec.implementations.memory import MemoryFileSystem

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation import storage
from qwen3_omni_neuron.compilation.manifest import MANIFEST_FILE, RECORD_FILE, read_manifest
from qwen3_omni_neuron.compilation.plan import MODELS
from qwen3_omni_neuron.compilation.runner import LOCK_FILE, compile_tree, tree_lock
from qwen3_omni_neuron.compilation.storage import local_tree, pull_tree, push_tree, tree_cache
from qwen3_omni_neuron.errors import ArtifactError, NotInstalledError, OptionError, OutputError
from qwen3_omni_neuron.untrusted_files import MOST_BYTES
from testing.made_trees import FILES, SLOW
from testing.specs import plan_of

MOMENTS = 4
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def tree(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled") / "tree"
    compile_tree(plan_of(checkpoint, read_config(checkpoint)), folder, SLOW)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qwen3-omni-neuron" / "trees"


@pytest.fixture
def store(tree: Path, tmp_path: Path) -> Path:
    """The tree, pushed to a folder."""
    return Path(push_tree(tree, str(tmp_path / "trees")))


@pytest.fixture(params=["folder", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory://":
        return f"memory://{uuid.uuid4()}/trees"
    return f"{request.param.removeprefix('folder')}{tmp_path}/trees"


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock and the records of single models."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (LOCK_FILE, RECORD_FILE)
    }


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def start(call: str) -> "subprocess.Popen[str]":
    """A process that pushes or pulls in small steps, and prints how far it is.

    slow:// is a folder of which each block of 997 bytes is copied and reported by itself.
    """
    code = (
        f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}\n"
        "import time\n"
        "from pathlib import Path\n"
        "from fsspec import AbstractFileSystem, register_implementation\n"
        "from fsspec.callbacks import Callback\n"
        "from fsspec.implementations.local import LocalFileSystem\n"
        "from qwen3_omni_neuron.compilation import storage\n"
        "class Slow(LocalFileSystem):\n"
        "    protocol, blocksize = 'slow', 997\n"
        "    get_file, put_file = AbstractFileSystem.get_file, AbstractFileSystem.put_file\n"
        "register_implementation('slow', Slow)\n"
        "def tell(total, done):\n"
        "    print(done, total, flush=True)\n"
        "    time.sleep(0.002)\n"
        f"storage.{call}, callback=Callback(hooks={{'tell': tell}}))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_tree_comes_back_as_it_was(tree: Path, url: str, tmp_path: Path) -> None:
    address = push_tree(tree, url)
    assert re.fullmatch(re.escape(url) + r"/[0-9a-f]{64}", address)
    told: list[tuple[int, int]] = []
    callback = Callback(hooks={"tell": lambda total, done: told.append((done, total))})
    folder = pull_tree(address, tmp_path / "pulled", callback)
    assert content(folder) == content(tree)
    total = sum(record.bytes for record in read_manifest(tree).models.values())
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_the_same_tree_is_pushed_once_and_another_beside_it(
    tree: Path, store: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert push_tree(tree, str(store.parent)) == str(store)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    other = Path(shutil.copytree(tree, tmp_path / "other"))
    manifest = json.loads((other / MANIFEST_FILE).read_text())
    manifest["versions"]["torch"] = "another"
    (other / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert push_tree(other, str(store.parent)) != str(store)
    assert len(list(store.parent.iterdir())) == 2


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_killed_at_any_moment_it_goes_on(
    verb: str, tree: Path, store: Path, tmp_path: Path
) -> None:
    """A file that has its name is whole and is not copied again; the manifest comes last."""
    expected, moments = content(tree), random.Random(7)
    if verb == "push":
        target = tmp_path / "elsewhere" / store.name
        call = f"push_tree(Path({str(tree)!r}), {f'slow://{target.parent}'!r}"
    else:
        target = tmp_path / "pulled"
        call = f"pull_tree({f'slow://{store}'!r}, Path({str(target)!r})"
    kept: dict[str, int] = {}
    for _ in range(MOMENTS):
        process = start(call)
        assert process.stdout is not None
        for _ in range(moments.randrange(1, 60)):
            process.stdout.readline()
        process.kill()
        process.wait()
        found = {n: raw for n, raw in content(target).items() if not n.endswith(".part")}
        assert found.items() <= expected.items()
        assert MANIFEST_FILE not in found
        times = {name: (target / name).stat().st_mtime_ns for name in found}
        assert kept.items() <= times.items()
        kept = times
    assert kept
    process = start(call)
    process.communicate()
    assert process.returncode == 0
    assert content(target) == expected
    assert kept.items() <= {name: (target / name).stat().st_mtime_ns for name in kept}.items()


def test_one_of_several_processes_copies_a_tree_and_all_have_it(
    tree: Path, store: Path, cache: Path
) -> None:
    processes = [start(f"pull_tree({f'slow://{store}'!r}") for _ in range(3)]
    copied = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(map(bool, copied)) == [False, False, True]
    assert content(cache / store.name) == content(tree)


def test_what_was_changed_in_the_store_is_named_and_not_taken(
    tree: Path, store: Path, tmp_path: Path
) -> None:
    damaged = store / MODELS[2] / "deep" / "1.bin"
    flip(damaged)
    target = tmp_path / "pulled"
    with pytest.raises(ArtifactError, match=rf"{damaged} is not what was compiled: .* push the tr"):
        pull_tree(str(store), target)
    found = content(target)
    assert len(found) == 2 * FILES + 1  # of two models, and of the third the file before
    assert found.items() <= content(tree).items()
    flip(damaged)
    assert content(pull_tree(str(store), target)) == content(tree)


def test_a_file_cut_short_in_the_store_is_pushed_again(tree: Path, store: Path) -> None:
    short = store / MODELS[0] / "0.bin"
    os.truncate(short, 5)
    with pytest.raises(ArtifactError, match="the sha256 of its 5 bytes"):
        pull_tree(str(store))
    short.unlink()
    with pytest.raises(ArtifactError, match=rf"it has no {MODELS[0]}/0.bin. Push the tree again"):
        pull_tree(str(store))
    (store / MANIFEST_FILE).unlink()
    push_tree(tree, str(store.parent))
    assert content(pull_tree(str(store))) == content(tree)


def test_what_was_changed_here_meanwhile_is_copied_again(tree: Path, store: Path) -> None:
    folder = pull_tree(str(store))
    (folder / MANIFEST_FILE).unlink()
    flip(folder / MODELS[1] / "0.bin")
    assert content(pull_tree(str(store))) == content(tree)
    (folder / MODELS[1] / "0.bin").unlink()  # beside its manifest
    assert content(pull_tree(str(store))) == content(tree)


def test_a_changed_tree_is_not_pushed(tree: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tree, tmp_path / "copy"))
    flip(copy / MODELS[3] / "0.bin")
    with pytest.raises(ArtifactError, match=rf"{MODELS[3]}/0.bin has changed"):
        push_tree(copy, str(tmp_path / "trees"))
    assert not (tmp_path / "trees").exists()
    (copy / MANIFEST_FILE).unlink()
    with pytest.raises(ArtifactError, match="is not a whole compiled tree"):
        push_tree(copy, str(tmp_path / "trees"))


def test_an_address_is_of_one_content(tree: Path, store: Path) -> None:
    wrong = store.with_name("0" * 64)
    shutil.copytree(store, wrong)
    with pytest.raises(ArtifactError, match=rf"sha256 is {store.name}: it is not the tree of that"):
        pull_tree(str(wrong))
    plain = Path(shutil.move(wrong, store.with_name("latest")))
    assert pull_tree(str(plain)).name == store.name


def test_a_tree_that_is_here_needs_no_storage(store: Path, cache: Path) -> None:
    folder = pull_tree(f"file://{store}")
    shutil.rmtree(store)
    assert local_tree(f"file://{store}/") == folder == cache / store.name
    assert local_tree(str(store)) == store  # a folder is taken as it is
    with pytest.raises(ArtifactError, match=f"it has no {MANIFEST_FILE}"):
        pull_tree(f"file://{store}", store.with_name("another"))


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tree_cache() == Path.home() / ".cache" / "qwen3-omni-neuron" / "trees"


def test_another_tree_or_a_compile_is_not_overwritten(
    tree: Path, store: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tree, tmp_path / "copy"))
    assert pull_tree(str(store), copy) == copy  # it has it all
    (copy / MANIFEST_FILE).unlink()
    with pytest.raises(ArtifactError, match="is a folder that compile writes into"):
        pull_tree(str(store), copy)
    folder = pull_tree(str(store))
    (folder / MANIFEST_FILE).write_text("{}")
    with pytest.raises(ArtifactError, match=r"has another tree. Pull into another folder"):
        pull_tree(str(store))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="can't be written"):
        pull_tree(str(store), tmp_path / "file" / "tree")


def test_a_tree_that_came_while_it_waited_for_the_folder_is_not_overwritten(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"

    @contextmanager
    def late_lock(folder: Path, wait_s: float) -> Iterator[int]:
        with tree_lock(folder, wait_s) as descriptor:
            (folder / MANIFEST_FILE).write_text("{}")
            yield descriptor

    monkeypatch.setattr(storage, "tree_lock", late_lock)
    with pytest.raises(ArtifactError, match="has another tree"):
        pull_tree(str(store), place)
    assert (place / MANIFEST_FILE).read_text() == "{}"


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../../outside", "a//b"])
def test_no_file_is_written_outside_of_the_tree(name: str, store: Path, tmp_path: Path) -> None:
    manifest = json.loads((store / MANIFEST_FILE).read_text())
    files = manifest["graphs"][MODELS[0]]["files"]
    files[name] = files.pop("0.bin")
    (store / MANIFEST_FILE).write_text(json.dumps(manifest))
    plain = Path(shutil.move(store, store.with_name("latest")))
    with pytest.raises(ArtifactError, match="names a file outside of the tree: "):
        pull_tree(str(plain), tmp_path / "pulled")
    assert not list(tmp_path.rglob("outside"))


def test_a_manifest_is_read_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers for an address may send bytes without an end."""

    class Endless:
        closed = False

        def __enter__(self) -> "Endless":
            return self

        def __exit__(self, *_: object) -> None:
            Endless.closed = True

        def read(self, size: int) -> bytes:
            assert 0 < size <= MOST_BYTES
            return bytes(size // 2 + 1)  # HTTP gives what has come

    def cat_file(*_: object, **__: object) -> bytes:
        raise AssertionError("all of it is read")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *_, **__: Endless())
    with pytest.raises(ArtifactError, match=rf"json can't be read: .*more than {MOST_BYTES} bytes"):
        pull_tree("memory://endless")
    assert Endless.closed


def test_without_room_it_says_how_much_is_missing(
    tree: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
        with pytest.raises(OutputError, match=r"0.3 MB of .* has 0.0 MB free. Make room"):
            pull_tree(str(store))
    assert content(pull_tree(str(store))) == content(tree)


def test_a_disk_that_is_really_full(
    tree: Path, store: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled by others after it was looked at."""
    target = small_disk / "tree"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
        with pytest.raises(OutputError, match="No space left on device"):
            pull_tree(str(store), target)
    found = content(target)
    assert 0 < len(found) < len(content(tree))
    assert found.items() <= content(tree).items()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert content(pull_tree(str(store), target)) == content(tree)


class Flaky(MemoryFileSystem):
    """A storage in memory that fails at its tenth file."""

    protocol = "flaky"
    opened = 0
    failing = False

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        type(self).opened += 1
        if self.failing and self.opened == 10:
            raise ConnectionError("the line is down")
        return super()._open(path, mode, **options)


def test_after_an_error_of_the_storage_it_goes_on(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    url = f"flaky://{uuid.uuid4()}"
    monkeypatch.setattr(Flaky, "failing", True)
    with pytest.raises(OutputError, match=r"be written: the line is down. Check"):
        push_tree(tree, url)
    address = push_tree(tree, url)
    Flaky.opened = 0
    with pytest.raises(ArtifactError, match=r"be read: ConnectionError\('the line is down'\)"):
        pull_tree(address, tmp_path / "pulled")
    assert content(pull_tree(address, tmp_path / "pulled")) == content(tree)


def test_an_address_that_nothing_opens_says_why(tree: Path) -> None:
    fsspec.register_implementation("absent", "no_such_module.System", errtxt="Install absentfs")
    with pytest.raises(NotInstalledError, match="that is not installed: Install absentfs"):
        pull_tree("absent://bucket/tree")
    with pytest.raises(OptionError, match="such as s3://BUCKET/TREES"):
        push_tree(tree, "nosuch://bucket")


def test_the_command_line_prints_address_and_folder(
    tree: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", str(tree), str(tmp_path / "trees")]) == 0
    address = capsys.readouterr().out.strip()
    assert cli.main(["pull", address]) == 0
    assert capsys.readouterr().out.strip() == str(cache / Path(address).name)
    assert cli.main(["pull", address, str(tmp_path / "here")]) == 0
    assert content(tmp_path / "here") == content(tree)
    assert cli.main(["pull", str(tmp_path / "nowhere")]) == 1
    assert "is not a whole compiled tree: it has no manifest.json" in capsys.readouterr().err
