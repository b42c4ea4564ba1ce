"""Partners of `talk`: a server's /v1/realtime, or a session of a model in this process."""

import base64
import json
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from qwen3_omni_neuron.cli.talk_sound import HEARD_RATE, Samples, Sink
from qwen3_omni_neuron.errors import NotInstalledError, OptionError, Qwen3OmniError
from qwen3_omni_neuron.events import AudioChunk, TextDelta
from qwen3_omni_neuron.serving.sound import pcm16, samples_of_pcm16

if TYPE_CHECKING:
    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.session import ReplyStream

_PIECE = HEARD_RATE  # samples in one event
_INSTALL = "pip install 'qwen3-omni-neuron[talk]'"
_OPEN_S = 10.0
_TICK_S = 0.05


class Partner(ABC):
    """Other side of a conversation, and its state. A thread of its own reports the answers.

    recording: the microphone's sound goes to the partner. by_hand: the user ends turns by Enter.
    over: set when the conversation can't go on, or is to end. error: the error that ended it.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self.recording = self.by_hand = False
        self.over = threading.Event()
        self.error: Qwen3OmniError | None = None
        self._answered = threading.Event()
        self._refused = False
        self._turn_end_s = 0.0
        self._first_sound_s: float | None = None

    @abstractmethod
    def hear(self, samples: Samples) -> None:
        """Add samples of the user's sound, at HEARD_RATE."""

    @abstractmethod
    def answer(self) -> None:
        """End the user's turn and answer it. Raises Qwen3OmniError if it can't be answered."""

    @abstractmethod
    def interrupt(self) -> None:
        """Stop the answer, and record how much of it was heard."""

    @abstractmethod
    def close(self) -> None:
        """End the answer and the conversation."""

    def pump(self, pieces: queue.Queue[Samples]) -> None:
        """Pass the microphone's sound to the partner until the conversation is over."""
        try:
            while not self.over.is_set():
                try:
                    samples = pieces.get(timeout=_TICK_S)
                except queue.Empty:
                    continue
                if self.recording:
                    self.hear(samples)
        except Qwen3OmniError as error:
            self._failed(error)

    def end_turn(self) -> None:
        """End the user's turn by hand, and have it answered."""
        self._turn_ended()
        try:
            self.answer()
        except Qwen3OmniError as error:
            self._refuse(str(error))

    def wait(self) -> None:
        """Wait until the turn is answered. Raises the error that ended the conversation."""
        while not (self._answered.wait(_TICK_S) or self.over.is_set()):
            pass
        if self.error is not None:
            raise self.error
        if self._refused:
            raise OptionError("the turn was not answered, and nothing is written.")

    def _turn_ended(self) -> None:
        self._turn_end_s, self._first_sound_s = time.monotonic(), None
        self._answered.clear()

    def _sound(self, samples: Samples) -> None:
        if self._first_sound_s is None:
            self._first_sound_s = time.monotonic()
        self._sink.push(samples)

    def _end_answer(self) -> None:
        """Note that the answer has ended, or was interrupted."""
        self._sink.end()
        print(flush=True)
        if self._first_sound_s is not None:
            say(
                f"first sound {1000 * (self._first_sound_s - self._turn_end_s):.0f} ms after the "
                f"turn, {self._sink.underruns} underruns so far"
            )
        self._answered.set()

    def _refuse(self, why: str) -> None:
        """Report that the turn can't be answered; the conversation goes on."""
        say(why)
        self._refused = True
        self._answered.set()

    def _failed(self, error: Qwen3OmniError) -> None:
        """End the conversation, which can't go on."""
        if self.by_hand and self.error is None:  # the thread that waits for Enter can't be woken
            say("The conversation has ended: press Enter.")
        self.error = self.error or error
        self.over.set()


class ServerPartner(Partner):
    """Server of this project, over its WebSocket. A thread reads its events."""

    def __init__(self, url: str, key: str, speaker: str | None, hands_free: bool, sink: Sink):
        """Connect. Raises NotInstalledError, and OptionError where no server accepts it."""
        super().__init__(sink)
        self._stack = ExitStack()
        self._socket = _connect(url, key, self._stack)
        self._lock = threading.RLock()  # guards the fields below, and orders sound and interruption
        self._item: str | None = None  # id of the item whose sound came last
        self._response: str | None = None  # id of the response that is being made
        self._dropped: str | None = None  # id of the last response that was interrupted
        self._asked = False  # a response was requested that the server has not begun
        self._unwanted = False  # the requested response was interrupted, too
        self._ends = False
        detection = {"type": "server_vad"} if hands_free else None
        form = {"type": "audio/pcm", "rate": HEARD_RATE}
        audio: dict[str, Any] = {"input": {"format": form, "turn_detection": detection}}
        if speaker is not None:
            audio["output"] = {"voice": speaker}
        self._send("session.update", session={"type": "realtime", "audio": audio})
        self._reader = threading.Thread(target=self._read, name="talk", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Close the connection."""
        self._ends = True
        self._stack.close()
        self._reader.join()

    def hear(self, samples: Samples) -> None:
        """Add samples of the user's sound."""
        for first in range(0, len(samples), _PIECE):
            data = pcm16(samples[first : first + _PIECE].clip(-1, 1))
            self._send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def answer(self) -> None:
        """End the user's turn and answer it."""
        self._send("input_audio_buffer.commit")
        self._asked = True
        self._send("response.create")

    def interrupt(self) -> None:
        """Stop the answer, and record how much of it was heard."""
        with self._lock:
            self._unwanted = self._asked
            if self._unwanted or self._response is not None:
                self._send("response.cancel")
            self._silence()

    def _silence(self) -> None:
        self._dropped = self._response
        heard_s = self._sink.interrupt()
        if heard_s is not None and self._item is not None:
            cut = {"item_id": self._item, "content_index": 0, "audio_end_ms": int(1000 * heard_s)}
            self._send("conversation.item.truncate", **cut)

    def _send(self, kind: str, **fields: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(json.dumps({"type": kind, **fields}))
        except ConnectionClosed as error:
            raise _ended(error) from error

    def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                event = json.loads(self._socket.recv())
                with self._lock:
                    self._take(event)
        except ConnectionClosed as error:
            if not self._ends:
                self._failed(_ended(error))
        except Qwen3OmniError as error:
            self._failed(error)

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("response_id", "") == self._dropped:
            return
        match event["type"]:
            case "input_audio_buffer.speech_started":
                self._silence()
            case "input_audio_buffer.speech_stopped":
                self._turn_ended()
            case "response.created":
                self._response = event["response"]["id"]
                if self._unwanted:
                    self._dropped = self._response
                self._asked = self._unwanted = False
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                print(event["delta"], end="", flush=True)
            case "response.output_audio.delta":
                self._item = event["item_id"]
                self._sound(samples_of_pcm16(base64.b64decode(event["delta"])))
            case "response.done":
                self._response = None
                if event["response"]["status"] == "failed":
                    self._refuse(event["response"]["status_details"]["error"]["message"])
                else:
                    self._end_answer()
            case "error":
                self._asked = self._unwanted = False
                self._error(**event["error"])

    def _error(self, code: str, message: str, param: str | None, **_: Any) -> None:
        if (param or "").startswith("session."):
            self._failed(OptionError(message))
        elif code != "response_cancel_not_active":  # otherwise the answer was complete
            self._refuse(message)


def _connect(url: str, key: str, stack: ExitStack) -> Any:
    try:
        from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException
        from websockets.sync.client import connect
    except ImportError as error:
        message = f"to talk with a server needs websockets, which is not installed: {_INSTALL}."
        raise NotInstalledError(message) from error
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/realtime"
    try:
        made = connect(
            urlunsplit((scheme, parts.netloc, path, "", "")),
            additional_headers={"Authorization": f"Bearer {key}"} if key else {},
            open_timeout=_OPEN_S,
            max_size=None,
            compression=None,
        )
        return stack.enter_context(made)
    except InvalidStatus as error:
        raise OptionError(f"{url} refuses: {_reason(error.response)}") from error
    except InvalidURI as error:
        message = f"--url {url} is no address of a server, such as http://127.0.0.1:8000."
        raise OptionError(message) from error
    except (OSError, WebSocketException) as error:
        raise OptionError(
            f"no server answers at {url} ({error}). Start one with `qwen3-omni-neuron serve`, "
            "or give the --url of another."
        ) from error


def _reason(response: Any) -> str:
    try:
        message = json.loads(response.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}."
    return f"{message} (--api-key)" if response.status_code == 401 else message


def _ended(error: Any) -> OptionError:
    reason = error.rcvd.reason if error.rcvd is not None else "the connection was lost"
    return OptionError(f"the server ended the session: {reason or 'without a reason'}.")


class ModelPartner(Partner):
    """Session of a model in this process. A thread of its own reads each answer."""

    def __init__(self, omni: "Qwen3Omni", speaker: str | None, hands_free: bool, sink: Sink):
        """Begin a session. Raises NotInstalledError, and OptionError for an unknown speaker."""
        super().__init__(sink)
        options: dict[str, Any] = {} if speaker is None else {"speaker": speaker}
        self._session = omni.session(literal_text=True, **options)
        self._speaks = bool(omni.info.speakers)
        self._detector = _detector() if hands_free else None
        self._stream: ReplyStream | None = None
        self._reader = threading.Thread()

    def close(self) -> None:
        """End the answer and the session."""
        self._stop()
        self._session.close()

    def hear(self, samples: Samples) -> None:
        """Add samples of the user's sound."""
        if self._detector is None:
            self._session.append_audio(samples, HEARD_RATE)
            return
        from qwen3_omni_neuron.serving.realtime.turns import Paused, Speech, Started, Stopped

        for event in self._detector.push(samples):
            if isinstance(event, Speech):
                self._session.append_audio(event.samples, HEARD_RATE)
            elif isinstance(event, Started):
                self.interrupt()
            elif isinstance(event, Paused):
                self._session.prepare(self._speaks)
            elif isinstance(event, Stopped):
                self.end_turn()

    def answer(self) -> None:
        """End the user's turn and answer it. Raises the session's errors."""
        self._stop()
        try:
            self._stream = self._session.respond(self._speaks)
        except Qwen3OmniError:
            self._session.clear()
            raise
        self._reader = threading.Thread(target=self._read, args=(self._stream,), daemon=True)
        self._reader.start()

    def interrupt(self) -> None:
        """Stop the answer, and record how much of it was heard."""
        heard_s = self._sink.interrupt()
        self._stop()
        self._sink.interrupt()  # drop the sound that came in between
        if heard_s is not None and self._stream is not None and self._stream.reply.spoken:
            self._session.heard(min(heard_s, self._stream.reply.audio_s))

    def _stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._reader.join()

    def _read(self, stream: "ReplyStream") -> None:
        try:
            with stream:
                for event in stream:
                    if isinstance(event, TextDelta):
                        print(event.text, end="", flush=True)
                    elif isinstance(event, AudioChunk):
                        self._sound(event.samples)
        except Qwen3OmniError as error:
            self._refuse(str(error))
        else:
            self._end_answer()


def _detector() -> Any:
    from qwen3_omni_neuron.serving.realtime.turns import TurnDetector, TurnSettings
    from qwen3_omni_neuron.serving.realtime.vad import SileroVad, is_installed

    if not is_installed():
        raise NotInstalledError(f"--hands-free needs Silero's model: {_INSTALL}.")
    return TurnDetector(TurnSettings(), SileroVad())


def say(text: str) -> None:
    """Show the user a message that is not part of an answer."""
    print(f"[{text}]", file=sys.stderr, flush=True)
