"""A dialogue by DashScope's realtime class: two spoken questions, whose ends the server finds.

python -m testing.clients.dashscope_realtime URL CLIPS
"""

import base64
import json
import queue
import sys
import threading
import time
import wave
from array import array
from pathlib import Path
from typing import Any

from dashscope.audio.qwen_omni import (
    MultiModality,
    OmniRealtimeCallback,
    OmniRealtimeConversation,
)

RATE, PIECE_MS = 16000, 100
SILENCE_S = 2
WAIT_S = 30.0


class Heard(OmniRealtimeCallback):
    """Queue of the server's events."""

    def __init__(self) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()

    def on_event(self, message: Any) -> None:
        self.events.put(message if isinstance(message, dict) else json.loads(message))


def at_16_khz(file: Path) -> bytes:
    """Return the 16-bit samples of a clip of 24 kHz at RATE: of every three samples two."""
    with wave.open(str(file)) as clip:
        given = array("h", clip.readframes(clip.getnframes() // 3 * 3))
    made = array("h", bytes(len(given) // 3 * 4))
    made[::2] = given[::3]
    made[1::2] = array("h", ((a + b) // 2 for a, b in zip(given[1::3], given[2::3], strict=True)))
    return made.tobytes()


def speak(conversation: Any, file: Path) -> None:
    """Send a clip in real time, and silence, which ends the turn."""
    words = at_16_khz(file) + bytes(2 * RATE * SILENCE_S)
    size = 2 * RATE * PIECE_MS // 1000
    for at in range(0, len(words), size):
        piece = words[at : at + size].ljust(size, b"\0")
        conversation.append_audio(base64.b64encode(piece).decode())
        time.sleep(PIECE_MS / 1000)


def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the answers, and the seconds of sound of each."""
    heard = Heard()
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime"
    model = "qwen3-omni-flash-realtime"
    conversation = OmniRealtimeConversation(model, heard, url=address, api_key="none")
    conversation.connect()
    conversation.update_session([MultiModality.AUDIO, MultiModality.TEXT], voice="Cherry")
    answers, seconds = [], []
    for name in ("question", "sum"):
        threading.Thread(target=speak, args=(conversation, Path(clips, f"{name}.wav"))).start()
        text, size = "", 0
        while True:
            event = heard.events.get(timeout=WAIT_S)
            if event["type"] == "error":
                raise RuntimeError(str(event))
            if event["type"] == "response.audio_transcript.delta":
                text += event["delta"]
            elif event["type"] == "response.audio.delta":
                size += len(base64.b64decode(event["delta"]))
            elif event["type"] == "response.done":
                break
        answers.append(text)
        seconds.append(size / 2 / 24000)
    conversation.end_session()
    return {"answers": answers, "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
