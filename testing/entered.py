"""Files of the package that a request enters, counted by the interpreter itself.

    python -m testing.entered

Three requests over the checkpoint that ships: a spoken question, a streamed chat with speech, and a
turn of /v1/realtime whose end the server detects. Each is asked once before it is counted: what
only loading, importing or connecting enters is left out. Functions of helper processes don't count.
"""

import base64
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from testing.imports import PACKAGE, ROOT

MOST = {"a spoken question": 45, "a streamed chat": 66, "a realtime turn": 76}
"""Largest number of files that each request may enter."""
SOUND = ROOT / "examples" / "sum.wav"
DETECTED = {
    "input": {
        "format": {"type": "audio/pcm", "rate": 16000},
        "turn_detection": {"type": "server_vad", "silence_duration_ms": 200},
    }
}
LIMITS: dict[str, Any] = {"seed": 0, "thinker_max_new_tokens": 16, "talker_max_new_tokens": 60}


class Entries:
    """Files whose functions the process's threads enter while `counting` is true.

    It must exist before the threads that are to be counted start.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.counting = False
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if self.counting and event == "call" and frame.f_code.co_name != "<module>":
            self.files.add(frame.f_code.co_filename)

    def of(self, ask: Callable[[], None]) -> list[str]:
        """Return the package's files that a request enters at its second time, sorted."""
        ask()
        self.files.clear()
        self.counting = True
        ask()
        self.counting = False
        beginning = f"{PACKAGE}/"
        return sorted(n.removeprefix(beginning) for n in self.files if n.startswith(beginning))

    def close(self) -> None:
        """Let threads that start from now on run uncounted."""
        sys.setprofile(None)
        threading.setprofile(None)


def entered() -> dict[str, list[str]]:
    """Return the files that each request of MOST enters."""
    from testing.http_server import serving
    from testing.realtime import calling

    entries = Entries()
    try:
        with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=2) as omni:
            found = [entries.of(lambda: _question(omni))]
            with serving(omni) as server:
                found.append(entries.of(lambda: _chat(server)))
                with calling(server) as caller:
                    caller.update(audio=DETECTED)
                    found.append(entries.of(lambda: _turn(caller)))
        return dict(zip(MOST, found, strict=True))
    finally:
        entries.close()


def _question(omni: Qwen3Omni) -> None:
    messages = [{"role": "user", "content": [{"type": "audio", "audio": str(SOUND)}]}]
    assert len(omni.generate_audio(messages, **LIMITS).codes) > 1


def _chat(server: Any) -> None:
    from testing.http_server import client_of

    data = base64.b64encode(SOUND.read_bytes()).decode()
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    with client_of(server) as client:
        completions: Any = client.chat.completions
        chunks = completions.create(
            model=server.settings.model_name,
            messages=[{"role": "user", "content": content}],
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            stream=True,
            extra_body=LIMITS,
        )
        assert sum(len(json.dumps(chunk.model_dump())) > 1000 for chunk in chunks) > 1  # sound


def _turn(caller: Any) -> None:
    from testing.realtime import question, sound_of

    caller.say(np.pad(question(), (4000, 16000)))
    assert sound_of(caller.until("response.done"))


def main() -> None:
    """Print how many files each request enters, and which."""
    for name, files in entered().items():
        lines = sum(Path(PACKAGE, file).read_text(encoding="utf-8").count("\n") for file in files)
        print(f"{name}: {len(files)} files of {lines:,} lines, at most {MOST[name]}")
        print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
