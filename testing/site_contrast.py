"""Pages of the built site in a real browser: texts that are too faint, pages that are too wide.

    make site
    python -m testing.site_contrast [--screenshots FOLDER]

Each page is opened at the width of a phone and of a desk, in light and dark. What is fainter than
WCAG AA has it (a contrast of 4.5) or wider than the screen is printed, and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.browser import CHROMIUM, FAINT
from testing.imports import ROOT

SITE = ROOT / "build" / "site"
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")


def problems(browser: Any, width: int, scheme: str, folder: Path | None) -> Iterator[str]:
    """Open every page at one width in one scheme, and yield what is wrong.

    folder: where a screenshot of each page is written.
    """
    viewport = {"width": width, "height": 900}
    with browser.new_context(viewport=viewport, color_scheme=scheme) as context:
        page = context.new_page()
        for file in sorted(SITE.rglob("index.html")):
            name = "home" if file.parent == SITE else file.parent.relative_to(SITE).as_posix()
            page.goto(file.as_uri())
            page.evaluate("for (const x of document.querySelectorAll('details')) x.open = true")
            where = f"{name}, {width} px, {scheme}"
            for text, contrast in page.evaluate(FAINT):
                yield f"{where}: contrast {contrast:.2f} of {text[:60]!r}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                yield f"{where}: {wide} px wide"
            if folder is not None:
                shot = folder / f"{name.replace('/', '-')}-{width}-{scheme}.png"
                page.screenshot(path=shot, full_page=True)


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong; return the exit status."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).screenshots
    if not SITE.is_dir():
        parser.error(f"{SITE} is not there: run `make site` first.")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    found = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                for problem in problems(browser, width, scheme, folder):
                    sys.stdout.write(f"{problem}\n")
                    found += 1
        browser.close()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
