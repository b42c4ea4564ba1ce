"""Hooks of mkdocs (mkdocs.yml): which files are pages, and that each reads as it does on GitHub.

The pages keep their paths in the repository, where README.md and BENCHMARK.md are beside docs/, so
that the links between them need no other form here. Their addresses are shorter.
"""

import logging
import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# mkdocs counts the warnings of its own loggers.
LOGGER = logging.getLogger("mkdocs.hooks.site_pages")
# Where Python-Markdown and GitHub differ most: lists, blocks and tables that one of them overlooks.
_TAGS = re.compile(r"<(h[1-6]|li|ol|ul|pre|table|tr|img|strong|em)\b")
_GITHUB = MarkdownIt("commonmark", {"html": True}).enable("table")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the files of docs/, and the pages of the navigation beside it, under their paths."""
    paths = set(_pages(config.nav))
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            paths.add(f"docs/{file.src_uri}")
    for path in sorted(paths):
        if (ROOT / path).is_file():
            files.append(File(path, str(ROOT), config.site_dir, True, dest_uri=_target(path)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of a page in which the site finds other lists, blocks or tables than GitHub does."""
    source = page.markdown or ""
    here, there = Counter(_TAGS.findall(html)), Counter(_TAGS.findall(_GITHUB.render(source)))
    for tag in sorted(here.keys() | there.keys()):
        if here[tag] != there[tag]:
            LOGGER.warning(
                "%s has %d <%s> on the site and %d on GitHub: see whether a list or block "
                "lacks its empty line, or is indented by less than four spaces in a list.",
                *(page.file.src_uri, here[tag], tag, there[tag]),
            )
    return html


def _pages(entries: Any) -> list[str]:
    """Return the paths in a navigation: a list of paths, and of titles with a path or a list."""
    found = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            found += [value] if isinstance(value, str) else _pages(value)
    return found


def _target(path: str) -> str:
    """Return the file of the site that a file of the repository becomes."""
    short = PurePosixPath(path.removeprefix("docs/").removeprefix("src/qwen3_omni_neuron/"))
    if short.suffix != ".md":
        return str(short)
    folder = short.parent if short.name == "README.md" else short.with_suffix("")
    return str(folder / "index.html").lower()
