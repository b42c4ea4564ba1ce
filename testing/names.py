"""Names of modules, classes, files and commands in prose, and whether they exist.

Read from the source by AST and tokenize: nothing is imported, so NxDI need not be installed. Prose
is docstrings, comments and Markdown. A name is a path (`testing/results.py`, `cpu/native/`), a
dotted name (`checkpoint.parameters.load_parts`), a class name (`KvCache`), an identifier
(backticked, or with an underscore), a flag, or a command of make, of `python -m` or of
`qwen3-omni-neuron`.
"""

import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from testing.imports import NAME, ROOT

CODE_FOLDERS = ("src", "bench", "compile", "testing", "train", "test")
DATA = ROOT / "test" / "data"  # written by earlier versions
FOLDERS = (*CODE_FOLDERS, "deploy", "docs", "examples", "requirements")
SOURCE_SUFFIXES = ("py", "md", "c", "h", "toml", "txt", "png", "svg", "html", "jsonl")
OWN_TEST = "test/unit/test_names.py"  # names things that don't exist, on purpose
_WORD = r"[A-Za-z_]\w*"
_PATH = re.compile(r"(?<![\w./~$-])(?:[\w.-]+/)*[\w.*-]*[\w*](?:\.[a-z]+)?/?(?![\w-])")
_DOTTED = re.compile(rf"(?<![\w./$@-])({_WORD}(?:\.{_WORD})+)(?![\w/-]|\.\w)")
_CLASS = re.compile(r"(?<![\w./-])([A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+)(?![\w./-])")
_SNAKE = re.compile(r"(?<![\w./$-])([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?![\w/*-]|\.\w)")
_TICKED = re.compile(rf"`({_WORD})`")
# Classes whose fields become flags.
_FLAGS_OF = ("LoadOptions", "RequestOptions", "CompilePlan", "Limits", "ServerSettings")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])(?![\w-])")
_MAKE = re.compile(r"`make ([a-z][\w-]*)")
_MAKE_LINE = re.compile(r"^[#\s]*make ([a-z][\w-]*)")  # in a code block, or of the Makefile's head
_MODULE = re.compile(r"python -m ([\w.]+)")
_VERB = re.compile(r"(?:`|^\s*)qwen3-omni-neuron ([a-z][\w-]*)")
_URL = re.compile(r"https?://\S+|`?[\w.-]+@[\w.]+|\be\.g\.|\bi\.e\.|\bllama\.cpp\b|\"[^\"]*\"")
# Names of the reference: those after "transformers", or with the prefixes of its classes.
_TRANSFORMERS = re.compile(
    r"transformers(?:'s?)?,? `?[\w.]+`?(?:(?:,| and) [\w.]+[._]\w+)*"
    r"|\b(?:Qwen3OmniMoe|Qwen2|Whisper)\w*(?:\.\w+)*"
)
_TOKEN_NAMES = (("", "_id"), ("", "_token_id"), ("codec_", "_id"))
_PIP = re.compile(r"\bpython -m pip .*")
_PLACEHOLDER = re.compile(r"[\w./-]*\b(?:NAME|MODULE|TARGET|VERB|FILE|DIR)\b[\w./-]*")
_DATA_SUFFIXES = ("json", "wav", "so", "mp4", "safetensors", "pt", "npz")


@dataclass(frozen=True)
class Found:
    """A name in prose that does not exist: where, and of which kind."""

    file: str
    line: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind} {self.name}"


class Index:
    """Every name that the repository defines, by kind."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        listed = [file for name in FOLDERS for file in (root / name).rglob("*")]
        listed += [*root.glob("*"), *(root / ".ci").glob("*")]
        self.paths = {
            str(file.relative_to(root))
            for file in listed
            if file.is_file() and "__pycache__" not in file.parts and DATA not in file.parents
        }
        self.folders = {
            str(parent) for name in self.paths for parent in Path(name).parents if parent.parts
        }

    @cached_property
    def sources(self) -> dict[str, ast.Module]:
        """The Python files, parsed, which takes seconds."""
        return {
            name: ast.parse((self.root / name).read_text(encoding="utf-8"))
            for name in sorted(self.paths)
            if name.endswith(".py")
        }

    @cached_property
    def modules(self) -> dict[str, frozenset[str]]:
        """Names that each module binds, at any depth."""
        found = {_dotted(name): _bound(tree) for name, tree in self.sources.items()}
        for name in list(found):  # packages without an __init__.py, too
            for end in range(1, name.count(".") + 1):
                found.setdefault(".".join(name.split(".")[:end]), frozenset())
        return found

    @cached_property
    def identifiers(self) -> frozenset[str]:
        """Every identifier in the code, and every string that could be one."""
        found: set[str] = {*dir(builtins), *keyword.kwlist}
        for name, tree in self.sources.items():
            found |= _identifiers(tree) if name != OWN_TEST else set()
        for name in self.paths:
            if name.endswith((".c", ".h", "Makefile", ".toml", ".json")) and "model-" not in name:
                found |= set(re.findall(_WORD, (self.root / name).read_text(encoding="utf-8")))
        return frozenset(found)

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        """Definitions of classes by name."""
        found: dict[str, list[ast.ClassDef]] = {}
        for tree in self.sources.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def externals(self) -> frozenset[str]:
        """Top-level modules of other distributions that the code imports, and their aliases."""
        found: set[str] = set(sys.stdlib_module_names)
        for tree in self.sources.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    found |= {n for a in node.names for n in (a.name.split(".")[0], a.asname) if n}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    first = (node.module or "").split(".")[0]
                    if first not in (NAME, *CODE_FOLDERS):
                        found |= {first, *(alias.asname or alias.name for alias in node.names)}
        return frozenset(found - {NAME} - self.tops - set(CODE_FOLDERS))

    @cached_property
    def tops(self) -> frozenset[str]:
        """Rooms of the package and folders of the repository."""
        rooms = {name.split(".")[1] for name in self.modules if name.startswith(f"{NAME}.")}
        return frozenset(rooms | {name.split("/")[0] for name in self.folders})

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Every attribute that the code takes, and every field and method of its classes."""
        found: set[str] = set()
        for tree in self.sources.values():
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for nodes in self.classes.values():
            found |= {name for node in nodes for name in _bound(node)}
        return frozenset(found)

    @cached_property
    def strings(self) -> str:
        """Every string of the code, without docstrings."""
        found = []
        for tree in self.sources.values():
            texts = {text for _, text in docstrings(tree)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found += [node.value] if node.value not in texts else []
        return "\n".join(found)

    @cached_property
    def base_names(self) -> frozenset[str]:
        """The last name of every file and folder."""
        return frozenset(Path(path).name for path in (*self.paths, *self.folders))

    @cached_property
    def stems(self) -> frozenset[str]:
        """The last name of every module."""
        return frozenset(name.rsplit(".", 1)[-1] for name in self.modules)

    @cached_property
    def words(self) -> frozenset[str]:
        """Everything that an identifier in prose may name."""
        return self.identifiers | self.stems | self.tops | self.verbs

    @cached_property
    def flags(self) -> frozenset[str]:
        """Every option of the command line and of the scripts."""
        flags = set[str]()
        for name in _FLAGS_OF:
            fields = (field for options in self.classes[name] for field in _bound(options))
            flags |= {f"--{field.replace('_', '-')}" for field in fields}
        for name, tree in self.sources.items():
            for node in ast.walk(tree) if name != OWN_TEST else ():
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    flags |= set(_FLAG.findall(node.value)) if node.value[:2] == "--" else set()
        flags |= {f"--{kind}" for kind in ("audio", "image", "video")}
        return frozenset(flags)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Targets of the Makefile."""
        text = (self.root / "Makefile").read_text(encoding="utf-8")
        return frozenset(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))

    @cached_property
    def verbs(self) -> frozenset[str]:
        """Verbs of the command line."""
        for node in self.sources[f"src/{NAME}/cli/__init__.py"].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERBS":
                return frozenset(ast.literal_eval(node.value))
        raise AssertionError("the command line has no VERBS")

    def has_path(self, name: str, beside: str) -> bool:
        """Return whether a path exists from the root, from the package, or beside a file."""
        plain = name.rstrip("/")
        for base in (Path(), Path("src") / NAME, *Path(beside).parents):
            there = str(base / plain)
            if there in self.folders or (there in self.paths and not name.endswith("/")):
                return True
            if "*" in plain and any(Path(p).match(there) for p in self.paths):
                return True
        return plain in self.base_names

    def has_dotted(self, name: str) -> bool:
        """Return whether a dotted name is a module of the repository, or a member of one."""
        return any(self._resolves(base + name) for base in ("", f"{NAME}."))

    def _resolves(self, name: str) -> bool:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            bound = self.modules.get(".".join(parts[:end]))
            if bound is not None:
                rest = parts[end:]
                return not rest or (rest[0] in bound and self.has_class_member(*rest[:2]))
        return False

    def has_class_member(self, name: str, member: str = "") -> bool:
        """Return whether a class of that name, or one of its bases, has the member.

        True where the class is not of this repository, as a base of one may be: it may have any.
        """
        nodes = self.classes.get(name)
        if nodes is None or not member:
            return True
        bases = (_base_name(base) for node in nodes for base in node.bases)
        return any(member in _bound(node) for node in nodes) or any(
            self.has_class_member(base, member) for base in bases if base != name
        )


@cache
def index() -> Index:
    """Return the repository's index, made once."""
    return Index()


def prose(name: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each docstring and comment, or a document."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        yield from docstrings(index().sources[name])
        yield from _comments(text)
    elif name.endswith((".c", ".h")):
        for match in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL):
            yield text.count("\n", 0, match.start()) + 1, match[0]
    elif name.endswith(".md"):
        # Python blocks are run, and drawings name nothing.
        blank = re.sub(r"```(?:python|text|mermaid)\n.*?```", _keep_lines, text, flags=re.DOTALL)
        yield 1, re.sub(r"\]\([^)\s]+\)", "]", blank)  # another test checks link targets
    else:
        yield 1, "\n".join(line if "#" in line else "" for line in text.splitlines())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _keep_lines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


@cache
def unresolved(name: str) -> tuple[Found, ...]:
    """Return the names in a file's prose that do not exist."""
    found = []
    for first, text in prose(name):
        for offset, line in enumerate(text.splitlines()):
            for kind, what in unresolved_in(line, name):
                found.append(Found(name, first + offset, kind, what))
    return tuple(found)


def unresolved_in(line: str, file: str) -> list[tuple[str, str]]:
    """Return kind and name of each name in a line of a file's prose that does not exist."""
    known = index()
    for pattern in (_URL, _TRANSFORMERS, _PIP, _PLACEHOLDER):
        line = pattern.sub(" ", line)
    missing = [("path", path) for path in _paths(line) if not known.has_path(path, file)]
    missing += [("name", name) for name in _DOTTED.findall(line) if not _dotted_exists(name)]
    missing += [("class", name) for name in _CLASS.findall(line) if name not in known.identifiers]
    identifiers = [*_SNAKE.findall(line), *_TICKED.findall(line)]
    missing += [("identifier", name) for name in identifiers if not _is_identifier(name)]
    modules = [name.rstrip(".") for name in _MODULE.findall(line)]
    missing += [("module", name) for name in modules if not _module_exists(name)]
    make_lines = [] if file.endswith((".py", ".c", ".h")) else _MAKE_LINE.findall(line)
    for kind, used, names in (
        ("flag", _FLAG.findall(line), known.flags),
        ("make", [*_MAKE.findall(line), *make_lines], known.targets),
        ("verb", _VERB.findall(line), known.verbs),
    ):
        missing += [(kind, name) for name in used if name not in names]
    return missing


def _module_exists(name: str) -> bool:
    return name.split(".", 1)[0] in index().externals or index().has_dotted(name)


def _paths(line: str) -> Iterator[str]:
    """Yield every path of this repository that a line names, whether it exists or not."""
    tops = index().tops
    for match in _PATH.findall(line):
        head, _, suffix = match.rstrip("/").rpartition(".")
        after_flag = re.search(rf"--[\w-]+ {re.escape(match)}", line)  # a command's output
        folder = match.endswith("/") and len(match) > 2 and not after_flag
        source = bool(head) and suffix in SOURCE_SUFFIXES
        inside = "/" in match.rstrip("/") and match.split("/")[0] in tops and "." in match
        if folder or source or inside:
            yield match


def _is_identifier(name: str) -> bool:
    """Return whether the code has this identifier, or tts_eos_token_id for tts_eos."""
    here = index().words
    return not here.isdisjoint((name, *(f"{before}{name}{end}" for before, end in _TOKEN_NAMES)))


def _dotted_exists(name: str) -> bool:
    known = index()
    first, *rest = name.split(".")
    if rest[-1] in (*SOURCE_SUFFIXES, *_DATA_SUFFIXES):
        return True  # a file's name, see _paths
    if first[0].isupper() and first in known.classes:
        return known.has_class_member(first, rest[0])
    if first in known.tops or first == NAME:
        return known.has_dotted(name)
    if first in known.externals:
        return True
    if first in known.stems:  # a module named without the package's root
        return False
    # An attribute of an attribute, or a parameter that the code has under this name.
    return known.attributes.issuperset((first, *rest)) or name in known.strings


def _dotted(path: str) -> str:
    parts = Path(path.removeprefix("src/")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _bound(tree: ast.Module | ast.ClassDef) -> frozenset[str]:
    """Return the names that a module or class binds, imports or sets on self, at any depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


def _base_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _identifiers(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, attribute, None)
            if isinstance(value, str):
                found |= set(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set() if " " in node.value.strip() else set(re.findall(_WORD, node.value))
    return found
