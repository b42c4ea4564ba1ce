"""Pictures of the page at / in a real browser, and what axe-core finds on it.

    npm install axe-core    # only for --axe; anywhere
    python -m testing.page_pictures FOLDER [--axe node_modules/axe-core/axe.min.js]

Writes page.png, which is docs/page.png, and for the width of a phone and of a desk, in light and
dark, the page before the first turn, after some, and with its settings, a problem and the request
for a key. What axe calls serious or critical there is printed, and the exit status is 1.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import soundfile

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from testing.browser import Visitor, chromium, visiting, write_microphone
from testing.http_server import serving, url_of
from testing.imports import ROOT
from train.speech import MEASURING, spoken_clip

SIZES, SCHEMES = ((390, 844), (1280, 800)), ("light", "dark")
LONG = "say seven red goodbye white"
_OPEN_ALL = """() => {
  document.querySelector("#settings").open = true;
  for (const id of ["problem", "key-form"]) document.getElementById(id).hidden = false;
  document.getElementById("problem").textContent = "The server can't be reached. Trying again.";
}"""
_FOUND = """async () => (await axe.run()).violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, impact, nodes }) => `${impact} ${id}: ${nodes[0].html}`)"""


def talk(visitor: Visitor, question: Any, rate: int) -> None:
    """Say a question, and press the button of another one."""
    visitor.page.locator("#questions button").first.wait_for()
    visitor.page.click("#talk")
    visitor.until("window.say")
    visitor.say(question, rate)
    visitor.answered(1)
    visitor.page.locator("#questions button").nth(1).click()
    visitor.page.mouse.move(0, 0)
    visitor.answered(2)


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures and print what is wrong; return the exit status."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--axe", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    axe = None if given.axe is None else given.axe.read_text(encoding="utf-8")
    question, rate = soundfile.read(ROOT / "examples" / "sum.wav", dtype="float32")
    found: list[str] = []

    def look(visitor: Visitor, name: str) -> None:
        visitor.page.screenshot(path=folder / f"{name}.png")
        if axe is not None:
            visitor.page.evaluate(axe)
            found.extend(f"{name}: {line}" for line in visitor.page.evaluate(_FOUND))

    microphone = folder / "microphone.wav"
    write_microphone(microphone, question, rate, silence_s=1)
    with (
        Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni,
        serving(omni, model_name=SPEAKING_CHECKPOINT.name) as server,
        sync_playwright() as playwright,
        chromium(playwright, microphone) as browser,
    ):
        url = url_of(server)
        for width, height in SIZES:
            for scheme in SCHEMES:
                options: Any = {"viewport": {"width": width, "height": height}}
                with visiting(browser, url, True, color_scheme=scheme, **options) as visitor:
                    visitor.page.locator("#questions button").first.wait_for()
                    look(visitor, f"{width}-{scheme}-before")
                    talk(visitor, question, rate)
                    look(visitor, f"{width}-{scheme}-after")
                    visitor.page.evaluate(_OPEN_ALL)
                    look(visitor, f"{width}-{scheme}-settings")
        with visiting(browser, url, True, viewport={"width": 1120, "height": 700}) as visitor:
            talk(visitor, question, rate)
            visitor.say(spoken_clip(LONG, MEASURING, random.Random(1)), 16000)
            visitor.until("document.querySelectorAll('.track .sound').length === 3")
            visitor.page.wait_for_timeout(700)
            visitor.page.screenshot(path=folder / "page.png")
    for line in found:
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
