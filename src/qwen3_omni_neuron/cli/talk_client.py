"""Client of /v1/realtime for `talk`: of a server, or of one over a model in this process."""

import argparse
import base64
import json
import os
import queue
import re
import secrets
import ssl
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from qwen3_omni_neuron.cli.model_arguments import introduce, load_arguments, model_or_shipped
from qwen3_omni_neuron.cli.talk_sound import HEARD_RATE, Player, Samples, device
from qwen3_omni_neuron.errors import ExitStatus, OptionError
from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.sound.encoding import pcm16, samples_of_pcm16
from qwen3_omni_neuron.sound.speech_file import SpeechFile

LOADING_S = 600.0  # longest wait for a server that loads its model
_LOOK_S = 1.0  # time between two looks whether it has
_PIECE_BYTES = 2 * HEARD_RATE  # bytes of sound in one event: a second
# Codes of a certificate that nobody known vouches for: self-signed, or by an unknown authority.
_UNKNOWN_ISSUER = frozenset((18, 19, 20, 21))


def talk(parsed: argparse.Namespace) -> int:
    """Talk until the user ends it, or the file's turn is answered. Returns the exit status."""
    if parsed.source is not None and parsed.hands_free:
        raise OptionError("--from has one turn, so that there is nothing for --hands-free to find.")
    trusted = _trusted(parsed.url, parsed.ca)
    here = parsed.url is None
    if here:
        model_or_shipped(parsed)  # is checked before a device is opened
    if parsed.source is not None:
        turn = load_waveform({"audio": parsed.source}, HEARD_RATE, "--from")
    with ExitStack() as stack:
        file = (
            None if parsed.to is None else stack.enter_context(SpeechFile(parsed.to, SAMPLE_RATE))
        )
        player = Player(file)
        if file is None:
            player.latency_s = stack.enter_context(device("loudspeaker", player.fill)).latency
        url, key = _serve_model(parsed, stack) if here else (parsed.url, parsed.api_key)
        client = _Client(_connect(url, key, here, trusted, stack), player, parsed)
        if parsed.source is not None:
            client.answer(turn)
            player.drain()
            if client.cut:
                return ExitStatus.CUT
        else:
            stack.enter_context(device("microphone", client.take_sound))
            client.converse(parsed.hands_free)
    return ExitStatus.OK


class _Client:
    """A user's side of a session: sends sound and turns, plays and prints the answers.

    _inputs: events of the server, the microphone's sound, lines of stdin and None after them, and
    an error that ends it all. One thread takes them, so that no other field needs a lock.
    cut: whether a limit has ended an answer.
    """

    def __init__(self, socket: ClientConnection, player: Player, parsed: argparse.Namespace):
        self._socket, self._player = socket, player
        self.cut = False
        self._inputs: queue.Queue[Any] = queue.Queue()
        self._item: str | None = None  # id of the item whose sound came last
        self._response: str | None = None  # id of the response that is made and is not interrupted
        self._cancels = False  # response.cancel was sent, and the server has not acknowledged it
        self._answered: bool | None = None  # False: a turn was refused; None: no answer yet
        self._turn_end_s, self._first_sound_s = 0.0, 0.0
        detection = {"type": "server_vad"} if parsed.hands_free else None
        form = {"type": "audio/pcm", "rate": HEARD_RATE}
        audio: dict[str, Any] = {"input": {"format": form, "turn_detection": detection}}
        audio["output"] = {} if parsed.speaker is None else {"voice": parsed.speaker}
        self._send("session.update", session={"type": "realtime", "audio": audio})
        threading.Thread(target=self._read_events, daemon=True).start()

    def take_sound(self, samples: Samples, *_: object) -> None:
        """Take the microphone's next samples, [n, 1] at HEARD_RATE, in its thread."""
        self._inputs.put(pcm16(samples[:, 0].clip(-1, 1)))

    def answer(self, turn: Samples) -> None:
        """Have one turn answered. turn: [n] at HEARD_RATE. Raises OptionError if it is refused."""
        self._hear(pcm16(turn.clip(-1, 1)))
        self._end_turn()
        while self._answered is None:
            self._take(self._inputs.get())
        if not self._answered:
            raise OptionError("the turn was not answered, and nothing is written.")

    def converse(self, hands_free: bool) -> None:
        """Talk until stdin ends, or hands free until Ctrl-C. Raises the error that ends it."""
        if hands_free:
            _say("Speak. Sound from the loudspeaker would interrupt: use headphones. Ctrl-C ends.")
        else:
            _say("Enter: speak. Enter again: have it answered. Ctrl-D ends.")
            threading.Thread(target=self._read_lines, daemon=True).start()
        recording = hands_free
        while (found := self._inputs.get()) is not None:
            if isinstance(found, bytes):
                if recording:
                    self._hear(found)
            elif not isinstance(found, str):
                self._take(found)
            elif recording:
                recording = False
                self._end_turn()
            else:
                recording = self._cancels = True
                self._send("response.cancel")
                self._silence()
                _say("Speaking; Enter ends it.")

    def _read_events(self) -> None:
        with suppress(ConnectionClosed):
            for event in self._socket:
                self._inputs.put(json.loads(event))
        reason = self._socket.close_reason or "the connection was lost"
        self._inputs.put(OptionError(f"the server ended the session: {reason}."))

    def _read_lines(self) -> None:
        # In a file object of its own: Python can't exit while a thread reads in sys.stdin.
        with os.fdopen(sys.stdin.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                self._inputs.put(line)
        self._inputs.put(None)

    def _hear(self, sound: bytes) -> None:
        for first in range(0, len(sound), _PIECE_BYTES):
            piece = base64.b64encode(sound[first : first + _PIECE_BYTES]).decode()
            self._send("input_audio_buffer.append", audio=piece)

    def _end_turn(self) -> None:
        self._turn_end_s, self._first_sound_s = time.monotonic(), 0.0
        self._send("input_audio_buffer.commit")
        self._send("response.create")

    def _silence(self) -> None:
        """Stop playback, and tell the server how much of the answer was heard."""
        self._response, heard_s = None, self._player.interrupt()
        if heard_s is not None and self._item is not None:
            cut = {"item_id": self._item, "content_index": 0, "audio_end_ms": int(1000 * heard_s)}
            self._send("conversation.item.truncate", **cut)

    def _take(self, event: dict[str, Any] | OptionError) -> None:
        """Do what an event of the server asks for. Raises the error that ends the conversation."""
        if isinstance(event, OptionError):
            raise event
        if event.get("response_id", self._response) != self._response:
            return  # it was interrupted
        match event["type"]:
            case "input_audio_buffer.speech_started":
                self._silence()
            case "input_audio_buffer.speech_stopped":
                self._turn_end_s, self._first_sound_s = time.monotonic(), 0.0
            case "response.created" if not self._cancels:
                self._response = event["response"]["id"]
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                print(event["delta"], end="", flush=True)
            case "response.output_audio.delta":
                self._item = event["item_id"]
                self._first_sound_s = self._first_sound_s or time.monotonic()
                self._player.push(samples_of_pcm16(base64.b64decode(event["delta"])))
            case "response.done":
                self._response, self._cancels = None, False
                self._player.end()
                if event["response"]["status"] == "failed":
                    self._refused(**event["response"]["status_details"]["error"])
                else:
                    self._complete(event["response"]["status"])
            case "error":
                self._cancels = False
                self._refused(**event["error"])

    def _complete(self, status: str) -> None:
        self._answered = True
        print(flush=True)
        if status == "incomplete":
            self.cut = True
            _say("a limit of the server ended the answer: its end is missing")
        if self._first_sound_s:
            after_ms = 1000 * (self._first_sound_s - self._turn_end_s)
            underruns = f"{self._player.underruns} underruns so far"
            _say(f"first sound {after_ms:.0f} ms after the turn, {underruns}")

    def _refused(self, code: str, message: str, param: str | None = None, **_: Any) -> None:
        if (param or "").startswith("session."):
            raise OptionError(message)
        if code != "response_cancel_not_active":  # otherwise the answer was complete
            self._answered = False
            _say(message)

    def _send(self, kind: str, **fields: Any) -> None:
        with suppress(ConnectionClosed):  # _read_events reports it
            self._socket.send(json.dumps({"type": kind, **fields}))


def _serve_model(parsed: argparse.Namespace, stack: ExitStack) -> tuple[str, str]:
    """Serve a model on the loopback until the stack ends. Returns the server's URL, and its key."""
    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.serving.server import Server
    from qwen3_omni_neuron.serving.settings import ServerSettings

    key = secrets.token_urlsafe()
    limits = ("max_realtime_s", "max_realtime_bytes", "max_held_bytes")
    unlimited: dict[str, Any] = dict.fromkeys(limits, 1 << 50)
    settings = ServerSettings(port=0, api_keys=(key,), **unlimited)
    omni = Qwen3Omni.load(model_or_shipped(parsed), **load_arguments(parsed, slots=1))
    introduce(omni.info)
    return stack.enter_context(Server(settings, lambda: omni).running(grace_s=1.0)), key


def _trusted(url: str | None, ca: Path | None) -> ssl.SSLContext | None:
    """Return what a server's certificate is checked by. ca: None for what the system trusts.

    Returns None for a server without one. Raises OptionError.
    """
    if not (url or "").startswith(("https:", "wss:")):
        if ca is not None:
            raise OptionError("--ca is for a --url that begins with https:// or wss://.")
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # an ssl.SSLError is one
        raise OptionError(
            f"--ca {ca} can't be used: {error}. Give a certificate in PEM."
        ) from error


def _connect(
    url: str, key: str, here: bool, trusted: ssl.SSLContext | None, stack: ExitStack
) -> ClientConnection:
    """Connect to a server until the stack ends, once it has loaded its model.

    here: without a proxy. Raises OptionError, also for a server that loads for more than LOADING_S.
    """
    base = re.sub("^http", "ws", url.rstrip("/")).removesuffix("/v1")
    end_s, waits = time.monotonic() + LOADING_S, False
    try:
        while True:
            try:
                made = connect(
                    f"{base}/v1/realtime",
                    additional_headers={"Authorization": f"Bearer {key}"} if key else {},
                    max_size=None,
                    proxy=None if here else True,
                    ssl=trusted,
                )
                return stack.enter_context(made)
            except InvalidStatus as error:
                loads = _error_of(error).get("code") == "model_loading"
                if not loads or time.monotonic() > end_s:
                    raise
            if not waits:
                waits = True
                _say(f"{url} loads its model; waiting for up to {LOADING_S:.0f} s, Ctrl-C ends")
            time.sleep(_LOOK_S)
    except InvalidStatus as error:
        reason = _error_of(error).get("message") or f"status {error.response.status_code}."
        hint = " (--api-key)" if error.response.status_code == 401 else ""
        raise OptionError(f"{url} refuses: {reason}{hint}") from error
    except ssl.SSLCertVerificationError as error:
        raise OptionError(_distrust(url, error)) from error
    except (OSError, WebSocketException) as error:
        raise OptionError(
            f"no server answers at {url} ({error}). Start one with `qwen3-omni-neuron serve`, "
            "or give the --url of another, such as http://127.0.0.1:8000."
        ) from error


def _error_of(refusal: InvalidStatus) -> dict[str, Any]:
    """Return the error in the answer of a server that refuses; empty if it has none."""
    with suppress(ValueError, KeyError, TypeError):
        return dict(json.loads(refusal.response.body or b"")["error"])
    return {}


def _distrust(url: str, error: ssl.SSLCertVerificationError) -> str:
    """Return why a server's certificate is not trusted, and what to do."""
    said = error.verify_message.rstrip(".")
    if error.verify_code in _UNKNOWN_ISSUER:
        return (
            f"{url} has a certificate that neither the system nor --ca vouches for ({said}), so "
            "nothing was said to it. A server of one's own network has such a self-signed one. If "
            "it is yours, copy the file of its --tls-cert here, by a way that you trust, and give "
            "it as --ca FILE."
        )
    return (
        f"the certificate of {url} is not valid ({said}), so nothing was said to it. Ask the "
        "server by a name or address that its certificate has, and while that is valid; "
        "docs/deploy.md says how to make one."
    )


def _say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
