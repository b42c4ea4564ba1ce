"""Partners of `talk`: a server's /v1/realtime, or a session of a model in this process."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from qwen3_omni_neuron.cli.talk_sound import HEARD_RATE, Samples
from qwen3_omni_neuron.cli.talk_turns import Talk
from qwen3_omni_neuron.errors import NotInstalledError, OptionError, Qwen3OmniError
from qwen3_omni_neuron.events import AudioChunk, TextDelta
from qwen3_omni_neuron.serving.sound import pcm16

if TYPE_CHECKING:
    from types import TracebackType

    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.session import ReplyStream

_PIECE = HEARD_RATE  # samples in one event
_INSTALL = "pip install 'qwen3-omni-neuron[talk]'"
_OPEN_S = 10.0


class ServerPartner:
    """Server of this project, over its WebSocket. A thread reads its events."""

    def __init__(self, url: str, key: str, speaker: str | None, hands_free: bool, talk: Talk):
        """Connect. Raises NotInstalledError, and OptionError where no server accepts it."""
        self._talk = talk
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(_connected(url, key))
        self._lock = threading.Lock()  # orders an answer's next sound and its interruption
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
        self._on: dict[str, Callable[[dict[str, Any]], None]] = {
            "input_audio_buffer.speech_started": lambda _: self._silence(),
            "input_audio_buffer.speech_stopped": lambda _: talk.turn_ended(),
            "response.created": self._created,
            "response.output_audio_transcript.delta": self._text,
            "response.output_text.delta": self._text,
            "response.output_audio.delta": self._sound,
            "response.done": self._done,
            "error": self._error,
        }
        self._reader = threading.Thread(target=self._read, name="talk", daemon=True)
        self._reader.start()

    def __enter__(self) -> "ServerPartner":
        return self

    def __exit__(self, *_: object) -> None:
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
        with self._lock:
            self._dropped = self._response
            heard_s = self._talk.interrupted()
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
                if event["type"] in self._on:
                    self._on[event["type"]](event)
        except ConnectionClosed as error:
            if not self._ends:
                self._talk.failed(_ended(error))
        except Qwen3OmniError as error:
            self._talk.failed(error)

    def _created(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._response = event["response"]["id"]
            if self._unwanted:
                self._dropped = self._response
            self._asked = self._unwanted = False

    def _text(self, event: dict[str, Any]) -> None:
        if event["response_id"] != self._dropped:
            self._talk.text(event["delta"])

    def _sound(self, event: dict[str, Any]) -> None:
        data = np.frombuffer(base64.b64decode(event["delta"]), "<i2")
        with self._lock:
            if event["response_id"] != self._dropped:
                self._item = event["item_id"]
                self._talk.sound(data.astype(np.float32) / np.float32(32768))

    def _done(self, event: dict[str, Any]) -> None:
        self._response = None
        response = event["response"]
        if response["status"] == "failed":
            self._talk.refused(response["status_details"]["error"]["message"])
        else:
            self._talk.answered()

    def _error(self, event: dict[str, Any]) -> None:
        error = event["error"]
        self._asked = self._unwanted = False
        if error["code"] == "response_cancel_not_active":  # the answer was already complete
            return
        if (error["param"] or "").startswith("session."):
            self._talk.failed(OptionError(error["message"]))
        else:
            self._talk.refused(error["message"])


@contextmanager
def _connected(url: str, key: str) -> Iterator[Any]:
    try:
        from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException
        from websockets.sync.client import connect
    except ImportError as error:
        message = f"to talk with a server needs websockets, which is not installed: {_INSTALL}."
        raise NotInstalledError(message) from error
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/realtime"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with ExitStack() as stack:
        try:
            made = connect(
                urlunsplit((scheme, parts.netloc, path, "", "")),
                additional_headers=headers,
                open_timeout=_OPEN_S,
                max_size=None,
                compression=None,
            )
            socket = stack.enter_context(made)
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
        yield socket


def _reason(response: Any) -> str:
    try:
        message = json.loads(response.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}."
    return f"{message} (--api-key)" if response.status_code == 401 else message


def _ended(error: Any) -> OptionError:
    reason = error.rcvd.reason if error.rcvd is not None else "the connection was lost"
    return OptionError(f"the server ended the session: {reason or 'without a reason'}.")


class ModelPartner:
    """Session of a model in this process. A thread of its own reads each answer."""

    def __init__(self, omni: "Qwen3Omni", speaker: str | None, hands_free: bool, talk: Talk):
        """Begin a session. Raises NotInstalledError, and OptionError for an unknown speaker."""
        options: dict[str, Any] = {} if speaker is None else {"speaker": speaker}
        self._session = omni.session(literal_text=True, **options)
        self._talk = talk
        self._speaks = bool(omni.info.speakers)
        self._detector = _detector() if hands_free else None
        self._stream: ReplyStream | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "ModelPartner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self._end_answer()
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
                self._talk.end_turn(self)

    def answer(self) -> None:
        """End the user's turn and answer it. Raises the session's errors."""
        self._end_answer()
        try:
            self._stream = self._session.respond(self._speaks)
        except Qwen3OmniError:
            self._session.clear()
            raise
        self._reader = threading.Thread(target=self._read, args=(self._stream,), daemon=True)
        self._reader.start()

    def interrupt(self) -> None:
        """Stop the answer, and record how much of it was heard."""
        heard_s = self._talk.interrupted()
        self._end_answer()
        self._talk.interrupted()  # drop the sound that came in between
        if heard_s is not None and self._stream is not None and self._stream.reply.spoken:
            self._session.heard(min(heard_s, self._stream.reply.audio_s))

    def _end_answer(self) -> None:
        if self._stream is not None and self._reader is not None:
            self._stream.close()
            self._reader.join()

    def _read(self, stream: "ReplyStream") -> None:
        try:
            with stream:
                for event in stream:
                    if isinstance(event, TextDelta):
                        self._talk.text(event.text)
                    elif isinstance(event, AudioChunk):
                        self._talk.sound(event.samples)
        except Qwen3OmniError as error:
            self._talk.refused(str(error))
        else:
            self._talk.answered()


def _detector() -> Any:
    from qwen3_omni_neuron.serving.realtime.turns import TurnDetector, TurnSettings
    from qwen3_omni_neuron.serving.realtime.vad import SileroVad, is_installed

    if not is_installed():
        raise NotInstalledError(f"--hands-free needs Silero's model: {_INSTALL}.")
    return TurnDetector(TurnSettings(), SileroVad())
