"""Chromium with the page open: what its loudspeaker gets, and what its WebSocket carries."""

import base64
import io
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
DEVICE_RATE = 48000
_FLAGS = (
    *("--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
    "--use-file-for-fake-audio-capture={}%noloop",
)
# Sound for a loudspeaker also goes to the page's own microphone worklet. Times are Date.now(), in
# ms, when the page was told. onSent, onReceived, onRendered: called with each event and each sound.
_WATCH = """
window.rendered = []; window.received = []; window.sent = []; window.asked = null;
window.contexts = []; window.streams = []; window.sockets = []; window.onSent = () => {};
window.onReceived = window.onRendered = () => {};
const PlainContext = AudioContext;
window.AudioContext = class extends PlainContext {
  constructor(...given) {
    super(...given);
    window.contexts.push(this);
  }
};
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode) {
    this.context.audioWorklet.addModule("page/capture.worklet.js").then(() => {
      const tap = new AudioWorkletNode(this.context, "capture", { numberOfOutputs: 0 });
      tap.port.onmessage = ({ data: { samples, peak } }) => {
        window.rendered.push({ at: Date.now(), sounds: peak > 1e-3, samples });
        window.onRendered(window.rendered.at(-1));
      };
      connect.call(this, tap);
    }).catch((error) => {
      if (this.context.state !== "closed") throw error; // it was closed before anything sounded
    });
  }
  return connect.call(this, target, ...rest);
};
const Plain = WebSocket;
window.WebSocket = class extends Plain {
  constructor(...given) {
    super(...given);
    window.sockets.push(this);
    this.addEventListener("message", ({ data }) => {
      window.received.push({ at: Date.now(), ...JSON.parse(data) });
      window.onReceived(window.received.at(-1));
    });
  }
  send(data) {
    window.sent.push({ at: Date.now(), ...JSON.parse(data) });
    super.send(data);
    window.onSent(JSON.parse(data));
  }
};
const devices = navigator.mediaDevices;
const open = devices.getUserMedia.bind(devices);
devices.getUserMedia = async (asked) => {
  window.asked = asked;
  const stream = await open(asked);
  window.streams.push(stream);
  return stream;
};
"""
# A microphone that plays a test's samples at the test's time. allowed: the user's answer.
_PUPPET = """
const ask = devices.getUserMedia;
devices.getUserMedia = async (asked) => {
  if (asked.video) return ask(asked);
  await window.allowed;
  const context = new PlainContext();
  const microphone = new MediaStreamAudioDestinationNode(context);
  window.say = async (wav) => {
    const bytes = Uint8Array.from(atob(wav), (letter) => letter.charCodeAt(0));
    const source = context.createBufferSource();
    source.buffer = await context.decodeAudioData(bytes.buffer);
    source.connect(microphone);
    source.start();
    await new Promise((resolve) => (source.onended = resolve));
  };
  window.streams.push(microphone.stream);
  return microphone.stream;
};
"""
# The worklets by themselves: samples that the microphone sends, and what the loudspeaker plays.
CAPTURED = """async ([rate, hertz]) => {
  const context = new OfflineAudioContext(1, rate, rate);
  await context.audioWorklet.addModule("page/capture.worklet.js");
  const node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0 });
  const pieces = [];
  node.port.onmessage = ({ data }) => pieces.push(...data.samples);
  new OscillatorNode(context, { frequency: hertz }).connect(node);
  const source = new OscillatorNode(context, { frequency: hertz });
  source.connect(node);
  source.start();
  await context.startRendering();
  await new Promise((resolve) => setTimeout(resolve, 100));
  return pieces;
}"""


class Visitor:
    """One page of a server in a browser. requests: addresses that it asked for."""

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url
        self.requests: list[str] = []
        self.problems: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._noticed)

    def _noticed(self, line: Any) -> None:
        if line.type == "error":
            self.problems.append(line.text)

    def open(self, path: str = "/") -> None:
        self.page.goto(self.url + path)

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until an expression holds. Raises AssertionError after this many seconds."""
        end_s = time.monotonic() + seconds
        # Playwright's own wait evaluates strings, which the page's policy forbids.
        while not self.page.evaluate(f"() => Boolean({condition})"):
            assert time.monotonic() < end_s, f"it did not come to hold: {condition}"
            self.page.wait_for_timeout(20)

    def answered(self, number: int) -> None:
        """Wait until this many answers have ended."""
        self.until(
            f"document.querySelectorAll('.answer:not(.pending) .figures').length >= {number}"
            f" && [...document.querySelectorAll('.answer')].every((x) =>"
            f" /played|Interrupted/.test(x.textContent))"
        )

    def sent(self, kind: str) -> list[dict[str, Any]]:
        return self.page.evaluate("(kind) => sent.filter(({ type }) => type === kind)", kind)

    def received(self, kind: str) -> list[dict[str, Any]]:
        return self.page.evaluate("(kind) => received.filter(({ type }) => type === kind)", kind)

    def say(self, samples: NDArray[np.float32], rate: int) -> None:
        """Begin to play samples through the microphone of `visiting(puppet=True)`."""
        self.page.evaluate("(wav) => { window.said = say(wav) }", _wav(samples, rate))

    def say_to_the_end(self, samples: NDArray[np.float32], rate: int) -> None:
        """Play samples through that microphone, until the page has sent them and 0.5 s more."""
        self.say(samples, rate)
        self.page.evaluate("() => said")
        before = self.page.evaluate("sent.length")
        self.until(
            f"sent.slice({before}).filter(({{ type }}) => type.endsWith('buffer.append')).length"
            " >= 25"
        )

    def heard(self, since: float = 0.0) -> NDArray[np.float32]:
        """Return what the loudspeaker got from a time on: float32 [samples] at 24 kHz."""
        got = self.page.evaluate(
            """(since) => {
              const parts = rendered.filter(({ at }) => at >= since).map((x) => x.samples);
              const all = Int16Array.from(parts.flatMap((x) => [...x]));
              const letters = Array.from(new Uint8Array(all.buffer), (x) => String.fromCharCode(x));
              return btoa(letters.join(""));
            }""",
            since,
        )
        return np.frombuffer(base64.b64decode(got), "<i2") / np.float32(32767)


@contextmanager
def chromium(playwright: Any, microphone: Path) -> Iterator[Any]:
    """Start a browser. microphone: WAV that its fake device plays once a stream."""
    flags = [flag.format(microphone) for flag in _FLAGS]
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def visiting(browser: Any, url: str, puppet: bool = False, **options: Any) -> Iterator[Visitor]:
    """Open the page at url. puppet: its microphone is `Visitor.say`. options: playwright's."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.add_init_script(f"(() => {{ {_WATCH} {_PUPPET if puppet else ''} }})()")
        visitor = Visitor(page, url)
        visitor.open()
        yield visitor


def write_microphone(file: Path, samples: NDArray[np.float32], rate: int, silence_s: float) -> None:
    """Write a fake device's WAV: the samples, with silence before and after."""
    edge = np.zeros(DEVICE_RATE // 2, np.float32)
    spoken = soxr.resample(samples, rate, DEVICE_RATE)
    after = np.zeros(round(silence_s * DEVICE_RATE), np.float32)
    soundfile.write(file, np.concatenate((edge, spoken, after)), DEVICE_RATE, "PCM_16")


def _wav(samples: NDArray[np.float32], rate: int) -> str:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, "PCM_16", format="WAV")
    return base64.b64encode(file.getvalue()).decode()
