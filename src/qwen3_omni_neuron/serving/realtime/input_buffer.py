"""The user's sound from its arrival to the commit of its turn."""

from qwen3_omni_neuron.errors import AudioError
from qwen3_omni_neuron.prompt.turns import Turn
from qwen3_omni_neuron.serving.endpoints.media import sound_bytes
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    TURN_RATE,
    Resampler,
    Samples,
    codec_of,
    decoded_sound,
)
from qwen3_omni_neuron.serving.realtime.events import Connection
from qwen3_omni_neuron.serving.realtime.items import (
    EMPTY_MESSAGE,
    ITEM_BYTES,
    ConversationItems,
    item_of,
    new_item,
)
from qwen3_omni_neuron.serving.realtime.session_config import SoundFormat
from qwen3_omni_neuron.serving.realtime.transcribing import Transcriber, TurnTranscript
from qwen3_omni_neuron.serving.realtime.turn_detector import (
    SileroVad,
    TurnDetector,
    TurnEvent,
    TurnSettings,
    load_judge,
)

_LEAST_PIECE = 24  # samples: shorter pieces take as much memory


class InputBuffer:
    """Input audio buffer: decodes and resamples sound, detects turns, and appends to the session.

    item_id: the user's current turn. keeps: false if turns are only transcribed, not added to the
    conversation. Sync methods are for the session's thread.
    """

    def __init__(
        self,
        connection: Connection,
        items: ConversationItems,
        transcriber: Transcriber,
        form: SoundFormat,
        keeps: bool = True,
    ):
        self._connection, self._items, self._transcriber = connection, items, transcriber
        self.keeps = keeps
        self.codec = codec_of(form.type, form.rate)
        self._resampler = Resampler(self.codec.rate, TURN_RATE)
        self._detector: TurnDetector | None = None
        self._at = 0  # samples so far, of all turns
        self.item_id = new_id("item_")
        # The user's unfinished turn.
        self._samples = 0
        self._held = 0  # bytes reserved for its item
        self._transcript: TurnTranscript | None = None

    @property
    def is_empty(self) -> bool:
        """True before the user's turn begins."""
        return not self._samples

    def set_format(self, form: SoundFormat) -> list[TurnEvent]:
        """Change the format of later sound. Returns like `push`."""
        found = self._take(self._resampler.finish())
        self.codec = codec_of(form.type, form.rate)
        self._resampler = Resampler(self.codec.rate, TURN_RATE)
        return found

    def detect(self, settings: TurnSettings | None) -> None:
        """Replace the settings of turn detection; None: off."""
        if settings is not None and settings.by_meaning:
            load_judge()  # not in the first turn's pause
        if settings is None:
            self._detector = None
        elif self._detector is None:
            self._detector = TurnDetector(settings, SileroVad(), at=self._at)
        else:  # a begun turn continues
            self._detector.settings = settings

    def push(self, text: str) -> list[TurnEvent]:
        """Process base64 sound. Returns events for the session to handle. Raises ApiError."""
        return self._take(self._resampler.push(decoded_sound(text, self.codec, "audio")))

    def judged(self, complete: bool) -> list[TurnEvent]:
        """Resume after a judged pause: see `TurnDetector.judged`."""
        return [] if self._detector is None else self._detector.judged(complete)

    def append(self, samples: Samples) -> None:
        """Append sound to the user's turn. Raises ApiError over the session's limit."""
        if self.is_empty:
            self._transcript = self._transcriber.begin(self.item_id)
        account, size = self._items.account, sound_bytes(len(samples))
        kept = size * self.keeps + sound_bytes(max(0, _LEAST_PIECE - len(samples)))
        held = kept + size * (self._transcript is not None)
        account.hold(held)
        try:
            if self.keeps:
                self._items.session.append_audio(samples, TURN_RATE)
        except BaseException:
            account.release(held)
            raise
        self._samples += len(samples)
        self._held += kept
        if self._transcript is not None:
            self._transcriber.hear(self._transcript, samples)

    def expect_speech(self, seconds: float) -> None:
        """Start the idle timeout, if set, after `seconds`."""
        if self._detector is not None:
            self._detector.wait(seconds)

    async def commit(self, flush: bool) -> tuple[Turn, TurnTranscript | None]:
        """End the user's turn, send its item's events, and return it with its transcript.

        flush: include sound in the resampler and the detector. Raises ApiError.
        """
        try:
            turn, before, transcript = await self._connection.in_thread(self._commit, flush)
        except AudioError as error:
            code = "input_audio_buffer_commit_empty"
            raise ApiError(400, f"the input audio buffer: {error}", code) from error
        self.item_id = new_id("item_")
        fields = {"item_id": turn.id, "previous_item_id": before}
        await self._connection.send("input_audio_buffer.committed", **fields)
        await self._items.announce(item_of(turn), before)
        return turn, transcript

    async def clear(self) -> None:
        """Drop the user's unfinished turn."""
        self._at += len(self._resampler.finish())
        if self._detector is not None:
            self._detector.clear()
        await self._connection.in_thread(self._drop)
        await self._connection.send("input_audio_buffer.cleared")

    def _take(self, samples: Samples) -> list[TurnEvent]:
        self._at += len(samples)
        if self._detector is not None:
            return self._detector.push(samples)
        if len(samples):
            self.append(samples)
        return []

    def _commit(self, flush: bool) -> tuple[Turn, str | None, TurnTranscript | None]:
        if flush:
            rest = self._resampler.finish()
            self._at += len(rest)
            if self._detector is not None:
                rest = self._detector.end_turn(rest)
            if len(rest):
                self.append(rest)
        if self.is_empty:
            raise ApiError(
                400,
                "the input audio buffer is empty. Append sound first; with server_vad, wait for "
                "speech_started.",
                "input_audio_buffer_commit_empty",
            )
        session, transcript = self._items.session, self._transcript
        if self.keeps:
            turn = session.commit()
        else:
            assert transcript is not None, "sound that is not kept is transcribed"
            transcript.sound.check("append_audio")
            turn = session.read(EMPTY_MESSAGE)
            session.insert(turn)
        content = [{"type": "input_audio", "transcript": None}]
        turn.shown = new_item("message", self.item_id, role="user", content=content)
        self._items.account.add(ITEM_BYTES)
        turn.id, turn.size = self.item_id, ITEM_BYTES + self._held
        self._transcript, self._samples, self._held = None, 0, 0
        return turn, self._items.previous(turn), transcript

    def _drop(self) -> None:
        self._items.session.clear()
        self._items.account.release(self._held)
        if self._transcript is not None:
            self._transcriber.drop(self._transcript)
        self._transcript, self._samples, self._held = None, 0, 0
