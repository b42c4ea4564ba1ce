"""Damage the files that a model is loaded from, and load it, in processes that may die.

Run as a program: `python -m testing.damaged_files FOLDER FIRST LAST` damages by the seeds FIRST up
to LAST, and prints a JSON list of what did not end as it must: in an error of the package, or
loaded, within LIMIT_S and LIMIT_BYTES of further address space.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testing.media_cases import audio, text

if TYPE_CHECKING:
    from qwen3_omni_neuron import Qwen3Omni

LIMIT_S = 2.0  # of a core's time
WAIT_S = 20.0  # a process that only waits, for a pipe that nobody writes, is busy for no time
LIMIT_BYTES = 200_000_000
BATCH = 400
SHARD = "model-00002-of-00004.safetensors"
# How often each file is damaged, of 100 times.
FILES = {
    "config.json": 24,
    "model.safetensors.index.json": 8,
    SHARD: 10,
    "generation_config.json": 7,
    "chat_template.json": 5,
    "chat_template.jinja": 10,
    "preprocessor_config.json": 7,
    "tokenizer_config.json": 6,
    "vocab.json": 4,
    "merges.txt": 2,
    "tokenizer.json": 5,
    "manifest.json": 6,
    "session": 4,
}
_PLAN = [name for name, count in FILES.items() for _ in range(count)]
random.Random(0).shuffle(_PLAN)
_SPECIAL = 7  # one in so many damages replaces the file by something that is no file, or huge
_RAW = {  # texts that stand for themselves in the written JSON
    "@1e400@": "1e400",
    "@nan@": "NaN",
    "@inf@": "-Infinity",
    "@long@": "9" * 5000,
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@open@": '{"a":' * 50_000,
    "@lists@": "[" + "[]," * 5_000_000 + "[]]",
    "@some@": "[" + "{}," * 300_000 + "{}]",
    "@half@": '"\\ud800"',
}
_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**16, 2**20, 2**24, 2**31, 2**40, 2**63, 2**64, 10**9, 10**40)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.0, 0.5, -1.5, 1e308, 1e-308, "", "x", "x" * 100_000, "\0", "\u202e"),
    *("../config.json", "/etc/passwd", "..", "<|im_end|>", [], {}, [0], [[]], {"a": 1}, [None] * 3),
    *(list(range(1000)), [2**40] * 3, {"a": {"b": {}}}, [1] * 100_000, *_RAW, *_NUMBERS * 2),
)
_TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 2 ** 10 }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ 'a'.center(10000000000) }}{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a'|indent(1000000000) }}",
    "{{ [1]|tojson(indent=1000000000) }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ('b' * 100000)|replace('b', 'a' * 1000) }}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x }}",
    "{{ ''.__class__.__mro__ }}",
    "{% if a %}" * 3000,
    "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "{{ lipsum(1000000) }}{% include '/etc/passwd' %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "{{ undefined.attribute }}",
)


class Damage:
    """The damage of one seed. name: file of FILES. Applying it twice does the same."""

    def __init__(self, seed: int):
        self.name = _PLAN[seed % len(_PLAN)]
        self._random = random.Random(seed)
        self._special = seed % _SPECIAL == 0

    def apply(self, path: Path) -> str:
        """Damage the file. Returns what was done."""
        if self._special:
            change = self._random.choice(_SPECIALS)
            change(path)
            return change.__name__
        ways = [_damage_bytes]
        if path.suffix == ".json":
            ways += [_damage_json] * 5
        ways += {".safetensors": [_damage_header] * 5, ".jinja": [_damage_template] * 2}.get(
            path.suffix, []
        )
        ways += [_damage_session] * 3 if path.name == "session" else []
        way = self._random.choice(ways)
        path.write_bytes(way(path.read_bytes(), self._random))
        return way.__name__


def _damage_bytes(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 5, 50))):
        at = rng.randrange(len(changed) + 1)
        if len(content) > 100_000 and rng.random() < 0.8:
            at = rng.randrange(min(20_000, len(changed) + 1))  # in a header
        some = rng.randrange(1, 40)
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:at] = rng.randbytes(some)
            case 2:
                del changed[at : at + some]
            case 3:
                changed[at : at + some] = changed[-some:]
            case 4:
                changed[at:at] = rng.choice((b"[", b"{", b'"', b",", b"9", b"-", b"\\", b"\xff"))
            case 5 if rng.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def _damage_json(content: bytes, rng: random.Random) -> bytes:
    document = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        owner, key = rng.choice([*_places(document)])
        match rng.randrange(8):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[rng.choice(("new", "", "dtype", "x" * 1000))] = deepcopy(rng.choice(_VALUES))
            case 2 if type(owner[key]) is int:
                number = owner[key]
                owner[key] = rng.choice((number + 1, number - 1, 2 * number, number // 2, -number))
            case 3:
                other, place = rng.choice([*_places(document)])
                owner[key] = json.loads(json.dumps(other[place]))
            case _:
                owner[key] = deepcopy(rng.choice(_VALUES))
        if not isinstance(document, dict) or not document:
            break
    return _written(document, rng)


def _written(document: Any, rng: random.Random) -> bytes:
    text = json.dumps(document)
    for raw, meant in _RAW.items():
        text = text.replace(f'"{raw}"', meant)
    if rng.random() < 0.03:  # a key twice
        text = '{"model_type":1,"weight_map":{},"schema":2,' + text[1:]
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list or object in a document with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield value, key
        if isinstance(inner, dict | list) and len(inner) < 5000:
            yield from _places(inner)


def _damage_header(content: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = _damage_json(content[8 : 8 + length], rng)
    wrong = rng.choice((0, 1, length - 1, length + 8, 10**8, 2**40, 2**63))
    stated = wrong if rng.random() < 0.1 else len(header)
    return struct.pack("<Q", stated) + header + content[8 + length :]


def _damage_template(content: bytes, rng: random.Random) -> bytes:
    at = content.find(b"{", rng.randrange(len(content)))
    part = rng.choice(_TEMPLATES).encode()
    return part if rng.random() < 0.5 else content[:at] + part + content[at:]


def _damage_session(content: bytes, rng: random.Random) -> bytes:
    """Change what a stored session says, with the right checksum."""
    line = content.index(b"\n") + 1
    body = content[line + 32 :]
    length = int.from_bytes(body[:8], "little")
    text, arrays = _damage_json(body[8 : 8 + length], rng), body[8 + length :]
    body = len(text).to_bytes(8, "little") + text + arrays
    return content[:line] + hashlib.sha256(body).digest() + body


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _terminal(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/tty")


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _socket(path: Path) -> None:
    path.unlink()
    there = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(there)


def _huge(path: Path) -> None:
    os.truncate(path, 2**40)  # takes no room on the disk


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(30_000_000))


def _lists(path: Path) -> None:
    path.write_bytes(b"[" * 10_000_000)


_SPECIALS: tuple[Callable[[Path], None], ...] = (
    *(_missing, _empty, _pipe, _folder, _endless, _terminal, _circle, _socket, _huge, _zeros),
    _lists,
)


class Loads:
    """Loads of one process from a folder with a checkpoint, and the files made from it."""

    def __init__(self, folder: Path, work: Path):
        from qwen3_omni_neuron.checkpoint.config_json import read_config

        self._whole, self._work = folder, work
        self._config = read_config(folder)

    def prepare(self, name: str) -> Path:
        """Make a copy of all files of links, with its own copy of one. Returns that one's path."""
        folder = self._work / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self._whole.iterdir():
            if path.is_file():
                (folder / path.name).symlink_to(path)
        tree = folder / "compiled"
        if name == "manifest.json":
            tree.mkdir()
            for path in (self._whole / "compiled").iterdir():
                (tree / path.name).symlink_to(path)
        path = (tree if name == "manifest.json" else folder) / name
        source = self._whole / "compiled" / name if name == "manifest.json" else self._whole / name
        path.unlink(missing_ok=True)
        if name == "chat_template.jinja":
            (folder / "chat_template.json").unlink()
            legacy = json.loads((self._whole / "chat_template.json").read_text())
            path.write_text(legacy["chat_template"])
        elif name == "tokenizer.json":
            path.write_text(self._tokenizer_json())
        elif name == "session":
            shutil.copy(self._session(), path)
        else:
            shutil.copy(source, path)
        return path

    @cached_property
    def omni(self) -> "Qwen3Omni":
        """The model of the whole checkpoint, for sessions."""
        from qwen3_omni_neuron import Qwen3Omni

        return Qwen3Omni.load(self._whole, max_concurrency=1)

    def _tokenizer_json(self) -> str:
        from qwen3_omni_neuron.prompt.tokenizer import Tokenizer

        return Tokenizer(self._whole).to_json()

    def _session(self) -> Path:
        found = self._work / "whole-session"
        if not found.exists():
            with self.omni.session("Be brief.", seed=1) as session:
                session.append("Hello")
                for _ in session.respond(thinker_max_new_tokens=3, talker_max_new_tokens=3):
                    pass
                session.append([audio(0.5)])
                session.save(found)
        return found

    def run(self, name: str, path: Path) -> None:
        """Use a file. Raises the errors of its reader."""
        if name == "session":
            with self.omni.restore_session(path) as session:
                session.append("And?")
                for _ in session.respond(thinker_max_new_tokens=2, talker_max_new_tokens=2):
                    pass
        elif name in ("config.json", "model.safetensors.index.json", SHARD):
            self._whole_load(path.parent)
        elif name == "manifest.json":
            self._whole_load(path.parent.parent, path.parent)
        else:
            self._conversation(path.parent)

    def _whole_load(self, folder: Path, tree: Path | None = None) -> None:
        from qwen3_omni_neuron import Qwen3Omni

        slots = 1 if tree is None else None
        with Qwen3Omni.load(folder, max_concurrency=slots, compiled_path=tree) as omni:
            messages = [{"role": "user", "content": "Hello"}]
            omni.generate_audio(messages, thinker_max_new_tokens=2, talker_max_new_tokens=3)

    def _conversation(self, folder: Path) -> None:
        from qwen3_omni_neuron.checkpoint.config_json import read_generation_defaults
        from qwen3_omni_neuron.checkpoint.files import conversation_fingerprint
        from qwen3_omni_neuron.options import check_defaults
        from qwen3_omni_neuron.prompt.builder import PromptBuilder

        check_defaults(read_generation_defaults(folder), folder)
        conversation_fingerprint(folder)
        prompt_builder = PromptBuilder(folder, self._config)
        prompt = prompt_builder.prompt([{"role": "user", "content": [audio(0.5), text("Hello")]}])
        assert int(prompt.token_ids.max()) < self._config.thinker.text.vocab_size


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit() -> None:
    """Let the rest of this process end with a signal where it takes too long, or too much."""
    _unlimit()
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + LIMIT_BYTES, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)


def _unlimit() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _batch(folder: Path, work: Path, seeds: list[int], report: int) -> None:
    """Damage and load by some seeds, in this process. Writes a line before and after each."""
    from qwen3_omni_neuron.errors import Qwen3OmniError

    loads = Loads(folder, work)
    for name in {Damage(seed).name for seed in seeds}:  # whatever is read, or started, only once
        loads.run(name, loads.prepare(name))
    for seed in seeds:
        damage = Damage(seed)
        path = loads.prepare(damage.name)
        os.write(report, f"{json.dumps([seed, damage.name, 'begun'])}\n".encode())
        done = damage.apply(path)
        _limit()
        try:
            loads.run(damage.name, path)
            ended = "loaded"
        except Qwen3OmniError as error:
            ended = f"{type(error).__name__}: {error}"
            if len(ended) > 5000:
                ended = f"failed: a message of {len(ended)} characters: {ended[:500]}"
        except BaseException:
            ended = "failed: " + traceback.format_exc()[-3000:]
        _unlimit()
        os.write(report, f"{json.dumps([seed, damage.name, f'{done} {ended}', ended])}\n".encode())


def damaged(folder: Path, work: Path, seeds: list[int]) -> dict[int, tuple[str, str]]:
    """Return the name of the damaged file and the end of each load, by seed."""
    found: dict[int, tuple[str, str]] = {}
    while left := [seed for seed in seeds if seed not in found]:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _batch(folder, work, left[:BATCH], writer)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            reports = [json.loads(line) for line in lines]
        _, status = os.waitpid(child, 0)
        if not reports:
            raise RuntimeError(f"a process ended ({status}) before the first damage")
        for seed, name, *ended in reports:
            killed = f"failed: the process ended by {status}"
            found[seed] = name, ended[-1] if len(ended) > 1 else killed
    return found


def main() -> None:
    """Damage by the seeds of the command line."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    found = damaged(folder, Path(sys.argv[4]), list(range(first, last)))
    json.dump([[seed, *ended] for seed, ended in found.items()], sys.stdout)


if __name__ == "__main__":
    main()
