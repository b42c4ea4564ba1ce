"""Spoken replies that a later turn may refer to by the id of their audio."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from qwen3_omni_neuron.serving.stored.folder import NotKeptError, SessionFolder

_COMPLETION, _AUDIO = "chatcmpl-", "audio_"
MOST_CHARACTERS = 4 << 20  # total of all transcripts


@dataclass(frozen=True)
class _KeptReply:
    owner: str
    transcript: str
    expires_at: float


class SpokenReplies:
    """Transcripts of spoken replies, limited in number and size, each kept until it expires.

    The audio is not kept: the model gets only the text of its earlier speech. With a session folder
    they are kept there; memory has those that were not written yet, or that it did not take.
    A lock guards all fields.
    """

    def __init__(
        self,
        most: int,
        seconds: float,
        now: Callable[[], float] = time.time,
        folder: SessionFolder | None = None,
        on_failure: Callable[[NotKeptError], None] = lambda _: None,
    ):
        """on_failure: called with each error of the folder, in its thread."""
        self._most, self._seconds, self._now = most, seconds, now
        self._folder, self._on_failure = folder, on_failure
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _KeptReply] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._kept)

    def named(self, completion_id: str) -> tuple[str, int]:
        """Return a new reply's id, from its completion's, and its time of expiry since 1970."""
        audio_id = _AUDIO + completion_id.removeprefix(_COMPLETION)
        return audio_id, int(self._now() + self._seconds)

    def may_wait(self, body: bytes) -> bool:
        """Return whether reading a request may wait for the disk, as it seems to name a reply."""
        return self._folder is not None and f'"{_AUDIO}'.encode() in body

    def keep(self, audio_id: str, expires_at: int, owner: str, transcript: str) -> None:
        """Keep the transcript of a complete reply. owner: the only owner who may refer to it."""
        with self._lock:
            self._kept[audio_id] = _KeptReply(owner, transcript, expires_at)
            self._characters += len(transcript)
            now = self._now()
            while self._kept and (
                len(self._kept) > self._most
                or self._characters > MOST_CHARACTERS
                or next(iter(self._kept.values())).expires_at <= now
            ):
                _, oldest = self._kept.popitem(last=False)
                self._characters -= len(oldest.transcript)

        if self._folder is not None:
            self._folder.later(self._write, audio_id, owner, transcript)

    def transcript(self, audio_id: str, owner: str) -> str | None:
        """Return the transcript of a reply; None if it is not kept or has another owner.

        Raises ApiError if it is kept and can't be read.
        """
        with self._lock:
            kept = self._kept.get(audio_id)
            if kept is not None and kept.owner == owner and kept.expires_at > self._now():
                return kept.transcript
        stored = None
        if self._folder is not None:
            stored = self._folder.get("reply", owner, audio_id)
        return None if stored is None else stored.decode(errors="surrogatepass")

    async def delete(self, completion_id: str, owner: str) -> bool:
        """Delete a reply by its completion's id. Returns whether it was kept for this owner."""
        audio_id, _ = self.named(completion_id)
        found = self._forget(audio_id, owner)
        if self._folder is not None:
            # After the write of the reply, if it still waits.
            removed = self._folder.later(self._folder.remove, "reply", owner, audio_id)
            found = await asyncio.wrap_future(removed) or found
        return found

    def _write(self, audio_id: str, owner: str, transcript: str) -> None:
        assert self._folder is not None
        data = transcript.encode(errors="surrogatepass")
        try:
            self._folder.put("reply", owner, audio_id, [data])
        except NotKeptError as error:
            self._on_failure(error)
        else:
            self._forget(audio_id, owner)

    def _forget(self, audio_id: str, owner: str) -> bool:
        """Remove a reply from memory. Returns whether it was there."""
        with self._lock:
            kept = self._kept.get(audio_id)
            if kept is None or kept.owner != owner:
                return False
            del self._kept[audio_id]
            self._characters -= len(kept.transcript)
            return True
