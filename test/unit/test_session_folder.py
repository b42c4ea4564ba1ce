"""The session folder: what is encrypted, for whom, how much of it, for how long, and what fails."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.stored.folder import NotKeptError, SessionFolder
from qwen3_omni_neuron.serving.stored.sealing import CHUNK_BYTES, Seal

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
KEPT_S = {"session": 100.0, "reply": 10.0, "used": 200.0}
BLOCK = 4096
TEXT = b"what was said"


def folder_of(path: Path, *keys: bytes, most: int = 1 << 20, **options: Any) -> SessionFolder:
    return SessionFolder(path, Seal(keys or (OLD,)), KEPT_S, most, **options)  # type: ignore[arg-type]


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def aged(path: Path, seconds: float) -> None:
    """Make a file older."""
    written = path.stat().st_mtime - seconds
    os.utime(path, (written, written))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_data_of_any_size_is_read_as_it_was_written(tmp_path: Path, size: int) -> None:
    folder, data = folder_of(tmp_path, most=1 << 23), os.urandom(size)
    folder.put("session", "me", "secret", [data])
    assert folder.get("session", "me", "secret") == data
    (file,) = files_of(tmp_path)
    assert file.stat().st_size == Seal.sealed_bytes(size)
    assert file.stat().st_mode & 0o777 == 0o600
    folder.put("session", "me", "secret", [TEXT], replaces=True)
    assert folder_of(tmp_path).get("session", "me", "secret") == TEXT  # another server
    assert len(files_of(tmp_path)) == 1


def test_names_and_files_reveal_no_owner_secret_or_content(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for number in range(2):
        folder.put("session", "address 10.0.0.1", f"secret {number}", [TEXT])
    first, second = files_of(tmp_path)
    assert first.name[:48] == second.name[:48]  # of one owner
    for file in (first, second):
        seen = file.name.encode() + file.read_bytes()
        for word in (TEXT, b"10.0.0.1", b"secret", OLD):
            assert word not in seen
    assert first.read_bytes()[32:] != second.read_bytes()[32:]
    other = tmp_path / "other"
    folder_of(other, NEW).put("session", "address 10.0.0.1", "secret 0", [TEXT])
    assert files_of(other)[0].name[16:48] != first.name[16:48]  # the owner's needs the key


def test_only_the_owner_with_the_secret_finds_a_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.put("session", "me", "secret", [TEXT])
    for kind, owner, secret in (
        ("session", "you", "secret"),
        ("session", "me", "another"),
        ("reply", "me", "secret"),
    ):
        assert folder.get(kind, owner, secret) is None  # type: ignore[arg-type]
        assert not folder.remove(kind, owner, secret)  # type: ignore[arg-type]
    assert folder.remove("session", "me", "secret")
    assert folder.get("session", "me", "secret") is None
    assert not files_of(tmp_path)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    """At any byte, cut off anywhere, under another name, or in the place of another one."""
    folder = folder_of(tmp_path, most=1 << 23)
    folder.put("session", "me", "secret", [bytes(CHUNK_BYTES + 100)])
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()

    def refused(content: bytes, code: str = "stored_damaged") -> None:
        file.write_bytes(content)
        with pytest.raises(ApiError) as error:
            folder.get("session", "me", "secret")
        assert error.value.code == code

    for at in (0, 7, 16, 31, 32, 1000, CHUNK_BYTES + 60, len(whole) - 1):
        lost = 8 <= at < 16  # the name of its key
        changed = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        refused(changed, "stored_key_lost" if lost else "stored_damaged")
    chunk = 32 + CHUNK_BYTES + 16
    for end in (0, 10, 32, 40, 1000, chunk, len(whole) - 1):
        refused(whole[:end])
    refused(whole + b"\0")
    refused(whole[:32] + whole[chunk:])
    folder.put("session", "you", "secret", [TEXT])
    (theirs,) = (path for path in files_of(tmp_path) if path != file)
    refused(theirs.read_bytes())
    file.write_bytes(whole)
    assert folder.get("session", "me", "secret") == bytes(CHUNK_BYTES + 100)


def test_files_too_large_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, largest=BLOCK)
    with pytest.raises(NotKeptError, match="a file may have 4096") as refused:
        folder.put("session", "me", "secret", [bytes(BLOCK + 1)])
    assert refused.value.reason == "room"
    folder.put("session", "me", "secret", [TEXT])
    (file,) = files_of(tmp_path)
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)  # takes no space
    with pytest.raises(ApiError, match="1099511627776 bytes, and 4144 are the most"):
        folder.get("session", "me", "secret")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ApiError, match="it is not a file"):
        folder.get("session", "me", "secret")
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ApiError) as error:
        folder.get("session", "me", "secret")
    assert error.value.status == 503


def test_a_new_key_encrypts_and_the_old_one_still_decrypts(tmp_path: Path) -> None:
    folder_of(tmp_path, OLD).put("session", "me", "old", [TEXT])
    both = folder_of(tmp_path, NEW, OLD)
    both.put("session", "me", "new", [TEXT])
    assert both.get("session", "me", "old") == both.get("session", "me", "new") == TEXT
    new = folder_of(tmp_path, NEW)
    assert new.get("session", "me", "new") == TEXT
    with pytest.raises(ApiError, match="the key that encrypted it is not among") as error:
        new.get("session", "me", "old")
    assert error.value.code == "stored_key_lost"
    assert new.get("session", "me", "never there") is None
    assert both.remove("session", "me", "old")


def test_each_kind_has_its_time_and_a_lost_key_changes_nothing_of_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for kind in ("session", "reply"):
        folder.put(kind, "me", "secret", [TEXT])  # type: ignore[arg-type]
    reply, session = sorted(files_of(tmp_path), key=lambda path: path.suffix)
    aged(reply, 11)
    aged(session, 99)
    assert folder.get("reply", "me", "secret") is None
    assert folder.get("session", "me", "secret") == TEXT
    folder.sweep()
    assert files_of(tmp_path) == [session]
    folder.touch("session", "me", "secret")
    aged(session, 99)
    folder.sweep()
    assert session.exists()
    aged(session, 2)
    left = tmp_path / f"{'0' * 32}.tmp"
    others = tmp_path / "notes.txt"
    for path in (left, others):
        path.write_bytes(b"")
        aged(path, 4000)
    folder_of(tmp_path, NEW)  # it sweeps as it begins
    assert files_of(tmp_path) == [others]


def test_a_full_folder_removes_the_oldest_files_of_the_largest_owner(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, most=8 * BLOCK, share=0.75)
    for number, owner in enumerate(("you", *["me"] * 7)):
        folder.put("session", owner, str(number), [TEXT])
        for path in files_of(tmp_path):
            aged(path, 1)
    left = [n for n in range(1, 8) if folder.get("session", "me", str(n))]
    assert left == [2, 3, 4, 5, 6, 7]  # six of eight blocks
    folder.put("session", "you", "8", [TEXT])
    folder.put("session", "you", "9", [TEXT])
    left = [n for n in range(1, 8) if folder.get("session", "me", str(n))]
    assert left == [3, 4, 5, 6, 7]  # not the oldest of all, which is another's
    assert folder.get("session", "you", "0") == TEXT
    assert folder.held == 8 * BLOCK
    with pytest.raises(NotKeptError, match="one owner may have 24576 of the folder") as refused:
        folder.put("session", "me", "10", [bytes(6 * BLOCK)])
    assert refused.value.reason == "room"
    assert len(files_of(tmp_path)) == 8


def test_a_new_version_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """In a full folder one of the same size removes nothing, and a larger one another file."""
    folder = folder_of(tmp_path, most=4 * BLOCK)
    for number in range(4):
        folder.put("session", "me", str(number), [TEXT])
        for path in files_of(tmp_path):
            aged(path, 1)
    oldest = min(files_of(tmp_path), key=lambda path: path.stat().st_mtime)
    folder.put("session", "me", "0", [b"more"], replaces=True)
    assert len(files_of(tmp_path)) == 4
    aged(oldest, 99)
    larger = bytes(BLOCK)
    folder.put("session", "me", "0", [larger], replaces=True)
    assert folder.get("session", "me", "0") == larger
    left = [n for n in range(1, 4) if folder.get("session", "me", str(n))]
    assert left == [2, 3]
    assert folder.held == 4 * BLOCK


def test_an_expired_version_is_not_counted_as_room_for_the_next(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, most=3 * BLOCK)
    folder.put("session", "me", "0", [TEXT])
    aged(*files_of(tmp_path), 101)
    for number in (1, 2):
        folder.put("session", "me", str(number), [TEXT])
    folder.put("session", "me", "0", [bytes(2 * BLOCK - 100)])
    assert len(files_of(tmp_path)) == 2
    assert folder.held == 3 * BLOCK


def test_files_of_other_servers_count_towards_the_limits(tmp_path: Path) -> None:
    one, other = (folder_of(tmp_path, most=4 * BLOCK) for _ in range(2))
    for number in range(4):
        other.put("session", "me", str(number), [TEXT])
        for path in files_of(tmp_path):
            aged(path, 1)
    one.sweep()
    one.put("session", "me", "4", [TEXT])
    assert len(files_of(tmp_path)) == 4
    assert one.get("session", "me", "0") is None


def test_a_file_that_was_removed_is_not_written_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.put("session", "me", "secret", [TEXT])
    folder_of(tmp_path).remove("session", "me", "secret")
    with pytest.raises(NotKeptError) as refused:
        folder.put("session", "me", "secret", [TEXT], replaces=True)
    assert refused.value.reason == "gone"
    assert not files_of(tmp_path)


def test_a_token_is_used_once_by_all_servers_and_keys(tmp_path: Path) -> None:
    """The note outlives the file that it is of, and goes when its time is over."""
    old, both, new = (folder_of(tmp_path, *keys) for keys in ((OLD,), (NEW, OLD), (OLD, NEW)))
    assert old.use("me", "secret")
    for folder in (old, both, new):
        assert folder.is_used("me", "secret") and not folder.use("me", "secret")
        assert not folder.is_used("you", "secret") and not folder.is_used("me", "other")
    both.put("session", "me", "secret", [TEXT])
    both.remove("session", "me", "secret")
    both.sweep()
    assert both.is_used("me", "secret") and both.held == 0
    for note in files_of(tmp_path):
        aged(note, 201)
    both.sweep()
    assert not files_of(tmp_path) and both.use("me", "secret")
    both.unuse("me", "secret")
    assert old.use("me", "secret") and not both.use("me", "secret")


def test_one_of_many_concurrent_uses_of_a_token_succeeds(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path, *keys) for keys in ((OLD, NEW), (NEW, OLD)) * 4]
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            together = Barrier(8)

            def use(folder: SessionFolder, token: str = str(number), wait: Any = together) -> bool:
                wait.wait()
                return folder.use("me", token)

            assert sum(pool.map(use, folders)) == 1


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    folder.put("session", "me", "secret", [TEXT])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotKeptError, match="No space left") as refused:
        folder.put("session", "me", "secret", [b"more"])
    assert refused.value.reason == "disk"
    assert len(files_of(tmp_path)) == 1
    assert folder.get("session", "me", "secret") == TEXT


def test_a_folder_that_can_not_be_written_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(OptionError, match="--session-folder a folder that"):
        folder_of(file)
    made = tmp_path / "new" / "one"
    folder_of(made)
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key: `openssl rand"),
        ("# none\n\n", "has no key"),
        (f"{OLD.hex()}\nabc\n", "the key in line 2 has no 64 hexadecimal digits"),
        (OLD.hex()[:-2], "line 1 has no 64"),
        (f"{OLD.hex()}\n#\n{OLD.hex().upper()}\n", "the key in line 3 is there already"),
    ],
)
def test_a_file_of_keys_that_can_not_be_used(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(OptionError, match=said) as refused:
        Seal.read(file)
    assert OLD.hex()[:8] not in str(refused.value)
    with pytest.raises(OptionError, match="can't be read"):
        Seal.read(tmp_path / "no file")


def test_keys_are_read_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the new one\n {NEW.hex()} \n\n{OLD.hex()}\n")
    names = Seal.read(file).owner_names("me")
    assert names == Seal([NEW, OLD]).owner_names("me")
    assert len(set(names)) == 2
