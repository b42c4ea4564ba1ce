"""Session: a conversation turn by turn; a question may arrive in pieces.

A turn is a request over all messages, with `api.Qwen3Omni.stream`'s reply. A session caches its
messages' features and pixels.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.compilation.manifest import written_whole
from qwen3_omni_neuron.engines.process.fork import OwnLock
from qwen3_omni_neuron.errors import (
    AudioError,
    ClosedError,
    ForkError,
    MessageError,
    OptionError,
    OutputError,
    PromptTooLongError,
    format_value,
)
from qwen3_omni_neuron.events import Event
from qwen3_omni_neuron.model.torch_threads import one_torch_thread
from qwen3_omni_neuron.options import RequestArguments, RequestOptions
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.media.fields import real_number
from qwen3_omni_neuron.prompt.media.items import AudioItem
from qwen3_omni_neuron.prompt.media.log_mel import GrowingClip
from qwen3_omni_neuron.prompt.messages import (
    Conversation,
    MessageReader,
    Truncation,
    is_blank,
    messages_of,
    read_tools,
)
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.prompt.stored import pack
from qwen3_omni_neuron.prompt.turns import (
    ROUNDING_S,
    Reply,
    Turn,
    joined_turns,
    kept_content,
    mean_pace,
)
from qwen3_omni_neuron.runtime.buffers import Item
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from qwen3_omni_neuron.runtime.runaway import SpokenPace
from qwen3_omni_neuron.runtime.stream import SpeechStream

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

STORED_KIND = "session"
"""Kind of the document in `Session.save`'s file; see prompt.stored."""


@dataclass(frozen=True)
class SessionModel:
    """Parts of a loaded model that a session uses.

    request: (prompt, options, speak, arrival time) -> request. most_tokens: of a prompt. owner:
    object that must outlive a stream.
    """

    prompt_builder: PromptBuilder
    pipeline: Pipeline
    request: Callable[[Prompt, RequestOptions, bool, float], Request]
    most_tokens: int
    speaks: bool
    fingerprint: Callable[[], str]
    owner: object


class ReplyStream(SpeechStream):
    """Stream of a session's reply; records the events that the caller gets.

    reply: the record, an entry of `Session.turns`.
    """

    def __init__(self, pipeline: Pipeline, request: Request, owner: object, reply: Reply):
        self.reply = reply
        super().__init__(pipeline, request, owner)

    def _event_of(self, item: Item | None) -> Event | None:
        event = super()._event_of(item)
        if event is not None:
            self.reply.add(event)
        return event

    def close(self) -> None:
        """Cancel the reply: a barge-in, if it has not finished."""
        super().close()
        self.reply.ended = True


class Session:
    """Conversation turn by turn: `append` and `append_audio` the user's words, then `respond`.

    Thread-safe. Close it, or use a `with` block. It uses a slot only while a reply streams.
    """

    def __init__(
        self,
        model: SessionModel,
        system: str | None,
        messages: Conversation,
        options: RequestOptions,
    ):
        """Do not call this; use `Qwen3Omni.session`."""
        self._model = model
        self._saving = OwnLock()  # guards the temporary file
        # Guards all fields below. Reentrant, as the pipeline's lock is.
        self._lock = OwnLock()
        self._begin(options)
        self._system: Turn | None = None
        self._history: list[Turn | Reply] = []
        self._turn: Turn | None = None  # the user's unanswered turn
        self._clip: GrowingClip | None = None  # the last item of _turn
        self._reply: Reply | None = None
        self._stream: Callable[[], ReplyStream | None] = lambda: None
        # Windows and peak of _clip at the last prefill ahead, if any.
        self._ahead_of: tuple[int, float] | None = None
        self._ahead: list[LiveRequest] = []  # prefills ahead that may still run
        self._pace = SpokenPace()
        self._closed = False
        self.system = system
        for index, message in enumerate(messages_of(messages)):
            self._history.append(self._turn_of(message, f"messages[{index}]"))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, as messages for `Qwen3Omni.stream` and `session`.

        A reply has the heard text. Audio appended in pieces, or as an array, is float32 at the
        model's rate; other media are unchanged.
        """
        with self._lock:
            return [turn.message for turn in self._conversation()]

    @property
    def system(self) -> Any:
        """Content of the system message before all turns, or None; can be set."""
        return None if self._system is None else self._system.given

    @system.setter
    def system(self, content: str | Sequence[Mapping[str, Any]] | None) -> None:
        with self._open():
            self._system = self._system_turn(content)

    @property
    def turns(self) -> list[Turn | Reply]:
        """The history's turns and replies, without the user's unfinished turn."""
        with self._lock:
            return list(self._history)

    def set_options(self, **options: "Unpack[RequestArguments]") -> None:
        """Replace the options of later replies.

        Raises OptionError, and the errors of `Qwen3Omni.stream` for tools.
        """
        with self._open():
            parsed = RequestOptions.parse(options)
            self._check_fixed(parsed)
            self._tools(parsed.tools)
            self._options = parsed

    def read(self, message: Mapping[str, Any]) -> Turn:
        """Read a message of any role, for `insert` and `respond`, without adding it.

        Raises the errors of `Qwen3Omni.stream` for a message.
        """
        with self._open():
            return self._turn_of(message, "message")

    def insert(self, turn: Turn | Reply, before: Turn | Reply | None = None) -> None:
        """Insert a turn into the history, before another one, or at the end."""
        with self._open():
            at = len(self._history) if before is None else self._index(before)
            self._history.insert(at, turn)

    def remove(self, turn: Turn | Reply) -> None:
        """Remove a turn or a reply from the history. A streaming reply continues."""
        with self._open():
            del self._history[self._index(turn)]

    def commit(self) -> Turn:
        """Move the user's turn into the history without answering it.

        Raises AudioError for too short a clip, which may continue; MessageError for an empty one.
        """
        with self._open():
            self._end_clip()
            turn = self._turn
            if turn is None:
                raise MessageError("no turn to end. Append text or audio first.")
            self._history.append(turn)
            self._turn = None
            return turn

    def clear(self) -> None:
        """Drop the content appended since the last turn ended."""
        with self._open():
            self._turn = self._clip = self._ahead_of = None

    def prepare(self, speak: bool = True) -> None:
        """Prefill the user's turn ahead, as if it ended here, when the model is idle.

        Does nothing while a reply streams, without a prefix cache, or if all is computed.
        """
        with self._open():
            model = self._model
            if self._turn is None or not model.pipeline.caches_prefixes or self._streaming():
                return
            options = self._options
            try:
                prompt = self._prompt(self._conversation(), options)
            except (AudioError, PromptTooLongError):  # the clip is still too short; see respond
                return
            self._prefill_ahead(prompt, options, speak and model.speaks)

    def append(self, content: str | Sequence[Mapping[str, Any]]) -> None:
        """Append content to the user's turn: text, or items as in messages.

        Ends the clip that append_audio began. Rejected content changes nothing.
        Raises the errors of `Qwen3Omni.stream`, and ClosedError.
        """
        with self._open():
            reader = self._reader()
            checked = reader.content(content, "user", "content")
            media = reader.media
            if is_blank(checked):
                raise MessageError("content is blank: append at least one word.")
            self._end_clip()
            self._turn = self._turn or Turn("user")
            self._turn.add(kept_content(content, media), checked, media)

    def append_audio(self, samples: Any, sampling_rate: float) -> None:
        """Append a piece of the user's speech, of any length; it is prefilled as it arrives.

        samples: [samples] or [samples, channels]; integers are scaled by their range. Pieces up to
        `respond` or `append` are one clip, of one rate and number of channels. A rejected piece
        changes nothing.
        Raises AudioError, PromptTooLongError and ClosedError.
        """
        with self._open():
            clip = self._clip or self._load.growing_clip(sampling_rate, "append_audio")
            clip.push(samples, sampling_rate)
            if self._clip is None and clip.begun:
                self._clip, self._ahead_of = clip, None
                self._turn = self._turn or Turn("user")
                self._turn.add([clip], [{"type": "audio"}], [AudioItem(clip)])
            if self._clip is not None:
                self._prefill_clip_ahead(clip)

    def respond(
        self,
        speak: bool = True,
        turns: Sequence[Turn | Reply] | None = None,
        system: str | None = None,
        keep: bool = True,
        **options: "Unpack[RequestArguments]",
    ) -> ReplyStream:
        """Answer the user's turn, event by event, as `Qwen3Omni.stream` does.

        speak: False for text alone. turns: answer these instead of the history and the user's turn,
        which stays open. system: system message of this reply. keep: add the reply to the history.
        options: this request's, which override the session's.
        Closing the stream early is a barge-in: the audio that the caller got counts as heard,
        unless `heard` says less. After an error, or if nothing was heard, the turn can be
        answered again.
        Raises MessageError if there is nothing to answer or a reply still streams, AudioError for a
        clip that is too short, and the errors of `Qwen3Omni.stream`.
        """
        arrived_s = self._model.pipeline.clock.now()
        with self._open():
            if self._streaming():
                raise MessageError(
                    "the last reply still streams. Read it to its end, or close its stream, and "
                    "respond then."
                )
            parsed = RequestOptions.parse(options, base=self._options)
            self._check_fixed(parsed)
            if turns is None:
                self._end_clip()
            first = self._system if system is None else self._system_turn(system)
            read = self._conversation(first) if turns is None else joined_turns([first, *turns])
            if not read or read[-1].role not in ("user", "tool"):
                raise MessageError(
                    "nothing to answer: the conversation does not end with a turn of the "
                    "user. Append text or audio first."
                )
            prompt = self._prompt(read, parsed)
            request = self._model.request(prompt, parsed, speak, arrived_s)
            request = replace(request, pace=self._pace)
            self._end_ahead(parsed.first_token_timeout_s)
            reply = Reply(speak, mean_pace([e for e in self._history if isinstance(e, Reply)]))
            stream = ReplyStream(self._model.pipeline, request, self._model.owner, reply)
            if turns is None and self._turn is not None:
                self._history.append(self._turn)
                self._turn = None
            if keep:
                self._history.append(reply)
            self._reply, self._stream = reply, weakref.ref(stream)
            return stream

    def heard(self, audio_s: float, reply: Reply | None = None) -> None:
        """Set how many seconds of a reply were heard; the history drops the rest.

        reply: one whose stream has ended; default: the last. Text counts as spoken at a constant
        pace, in UTF-8 bytes per second: the reply's own if the talker ended its speech, else the
        session's mean with BYTES_PER_S for RATE_WEIGHT_S. It is cut before the first token, or
        character of several tokens, that was less than half heard.
        Raises MessageError, and OptionError for more seconds than the caller got.
        """
        with self._open():
            reply = self._reply if reply is None else reply
            if reply is None or not reply.spoken:
                raise MessageError("no spoken reply to mark as heard. Respond first.")
            if not reply.ended:
                raise MessageError("the reply still streams. Close its stream, then call heard.")
            seconds = real_number(audio_s)
            if seconds is None or not 0 <= seconds <= reply.audio_s + ROUNDING_S:
                raise OptionError(
                    f"audio_s must be from 0 to {reply.audio_s:.3f}, the reply's audio so "
                    f"far, got {format_value(audio_s)}."
                )
            reply.heard_s = seconds

    def save(self, path: str | Path) -> None:
        """Write the session to a file, for `Qwen3Omni.restore_session`.

        The file has the turns with samples and pixels, heard seconds, options, and the user's
        unfinished turn. It is replaced atomically. A closed session can be saved. Raises
        MessageError while a reply streams or a clip has not ended, OutputError, and
        StoredSessionError for a value that JSON lacks.
        """
        with self._saving:
            data = pack(STORED_KIND, self._model.fingerprint(), self.document())
            try:
                with written_whole(Path(path)) as file:
                    file.write(data)
            except (OSError, ValueError) as error:  # a ValueError for a zero byte in the name
                raise OutputError(
                    f"{path} can't be written ({error}): the session is not saved. Free space, or "
                    "name a file in a writable folder."
                ) from error

    def document(self) -> dict[str, Any]:
        """Return the session as JSON values and arrays, for `prompt.stored.pack`.

        Don't change them. Raises MessageError as `save` does.
        """
        with self._lock:
            if self._streaming():
                raise MessageError(
                    "the last reply still streams. Read it to its end, or close its stream, and "
                    "save the session then."
                )
            if self._clip is not None:
                raise MessageError(
                    "a clip of append_audio has not ended. Save the session after `respond`, "
                    "`commit`, `append` or `clear`."
                )
            usual = RequestOptions()
            options = {f.name: getattr(self._options, f.name) for f in fields(usual)}
            last = [i for i, entry in enumerate(self._history) if entry is self._reply]
            return {
                "options": {n: v for n, v in options.items() if v != getattr(usual, n)},
                "system": None if self._system is None else self._system.stored,
                "turns": [
                    {"reply" if isinstance(entry, Reply) else "message": entry.stored}
                    for entry in self._history
                ],
                "unfinished": None if self._turn is None else self._turn.stored,
                "last_reply": last[0] if last else None,
                "slowest_pace": self._pace.slowest,
            }

    def restore(self, document: Mapping[str, Any]) -> None:
        """Resume another session from its `document`, with its options.

        Raises MessageError if this session is not empty.
        """
        with self._open():
            if self._history or self._turn is not None or self._reply is not None:
                raise MessageError("this session already has turns. Restore into a new session.")
            self._begin(RequestOptions.parse(document["options"]))
            system, unfinished = document["system"], document["unfinished"]
            if system is not None:
                self._system = self._stored_turn(system, "system")
            if unfinished is not None:
                self._turn = self._stored_turn(unfinished, "unfinished")
            self._history = [
                Reply.of(entry["reply"])
                if "reply" in entry
                else self._stored_turn(entry["message"], f"turns[{index}]")
                for index, entry in enumerate(document["turns"])
            ]
            if document["last_reply"] is not None:
                reply = self._history[document["last_reply"]]
                assert isinstance(reply, Reply)
                self._reply = reply
            self._pace = SpokenPace(document["slowest_pace"])

    def __repr__(self) -> str:
        number = len(self._history)
        states = ["1 turn" if number == 1 else f"{number} turns"]
        states += ["an unanswered turn of the user"] if self._turn else []
        states += ["a reply streams"] if self._streaming() else []
        states += ["closed"] if self._closed else []
        return f"<Session: {', '.join(states)}>"

    def close(self) -> None:
        """End the streaming reply and prefill ahead; `messages` remains readable."""
        with self._lock:
            self._closed = True
            stream = self._stream()
            self._end_ahead(0.0)
        if stream is not None:
            stream.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkError):  # in a child forked inside the block
            self.close()

    def _begin(self, options: RequestOptions) -> None:
        prompt_builder, most_tokens = self._model.prompt_builder, self._model.most_tokens
        self._options = options
        self._hear_videos, self._literal_text = options.use_audio_in_video, options.literal_text
        self._load = prompt_builder.loader(self._hear_videos, most_tokens)
        self._check = prompt_builder.text_check(most_tokens)
        self._reserved = () if self._literal_text else prompt_builder.reserved

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the session's lock, with one torch thread. Raises ClosedError."""
        with self._lock, one_torch_thread():
            if self._closed:
                raise ClosedError("this session was closed. Begin another one with its messages.")
            yield

    def _check_fixed(self, parsed: RequestOptions) -> None:
        for name, ours in (
            ("use_audio_in_video", self._hear_videos),
            ("literal_text", self._literal_text),
        ):
            if getattr(parsed, name) != ours:
                raise OptionError(
                    f"{name} is {ours} for the whole session, got {getattr(parsed, name)}. "
                    "Begin a session with it."
                )

    def _streaming(self) -> bool:
        return self._reply is not None and not self._reply.ended

    def _reader(self) -> MessageReader:
        return MessageReader(self._reserved, self._load.read, self._check)

    def _tools(self, tools: Sequence[Any]) -> list[dict[str, Any]]:
        return read_tools(tools, self._reserved, self._check)

    def _stored_turn(self, stored: Mapping[str, Any], where: str) -> Turn:
        # Don't refuse content that was accepted before, such as a text too long for a prompt.
        message = {name: stored.get(name) for name in ("role", "content", "tool_calls")}
        turn = self._turn_of(message, where, MessageReader(self._reserved, self._load.prepared))
        turn.keep(stored)
        return turn

    def _turn_of(
        self, message: Mapping[str, Any], where: str, reader: MessageReader | None = None
    ) -> Turn:
        reader = reader or self._reader()
        checked = reader.message(message, where)
        media = reader.media
        given = kept_content(message.get("content") or "", media)
        calls = checked.get("tool_calls", [])
        return Turn(checked["role"], given, checked["content"], media, calls)

    def _system_turn(self, content: str | Sequence[Mapping[str, Any]] | None) -> Turn | None:
        if content is None:
            return None
        return self._turn_of({"role": "system", "content": content}, "system")

    def _index(self, turn: Turn | Reply) -> int:
        for index, entry in enumerate(self._history):
            if entry is turn:
                return index
        raise MessageError("this turn is not in the session's history.")

    def _end_clip(self) -> None:
        if self._clip is not None:
            self._clip.end()
            self._clip = None

    def _conversation(self, system: Turn | None = None) -> list[Turn]:
        """Return the history and the user's unfinished turn. system: see `respond`."""
        return joined_turns([system or self._system, *self._history, self._turn])

    def _prompt(
        self, read: Sequence[Turn], options: RequestOptions, growing: bool = False
    ) -> Prompt:
        model = self._model
        media = [medium for turn in read for medium in turn.media]
        said = [index for index, turn in enumerate(read) if turn.said]
        messages = [turn.read for turn in read]
        return model.prompt_builder.assemble(
            messages,
            media,
            growing,
            self._tools(options.shown_tools),
            self._literal_text,
            said,
            model.most_tokens,
            Truncation.of(
                options.truncation, model.most_tokens + 1, options.thinker_max_new_tokens
            ),
        )

    def _prefill_clip_ahead(self, clip: GrowingClip) -> None:
        """Prefill the rows that are final, if a new window or peak may have changed them."""
        model, windows = self._model, self._model.prompt_builder.whole_windows(clip)
        state = windows, clip.peak if windows else 0.0
        if not model.pipeline.caches_prefixes or state == self._ahead_of or self._streaming():
            return
        self._ahead_of = state
        options = self._options
        try:
            prompt = self._prompt(self._conversation(), options, growing=True)
        except PromptTooLongError:  # `respond` raises it
            return
        speak = model.speaks and (self._reply is None or self._reply.spoken)
        self._prefill_ahead(prompt, options, speak)

    def _prefill_ahead(self, prompt: Prompt, options: RequestOptions, speak: bool) -> None:
        model = self._model
        if len(prompt) > model.most_tokens:
            return
        # Only a reply has a grammar; the prompt has shown the tools.
        options = replace(options, tools=(), tool_choice="auto", grammar=None)
        try:
            request = model.request(prompt, options, speak, model.pipeline.clock.now())
        except OptionError:  # unknown speaker: `respond` raises it, or gets another one
            return
        for earlier in self._ahead:
            if earlier.slot < 0:  # still waiting; the new one includes its rows
                model.pipeline.cancel(earlier)
        self._ahead = [earlier for earlier in self._ahead if not earlier.ended]
        self._ahead.append(model.pipeline.prefill_ahead(request))

    def _end_ahead(self, timeout_s: float) -> None:
        while self._ahead:
            self._model.pipeline.cancel(self._ahead.pop(), timeout_s)
