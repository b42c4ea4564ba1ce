"""Spoken replies that a later turn may refer to by the id of their audio."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_COMPLETION, _AUDIO = "chatcmpl-", "audio_"
MOST_CHARACTERS = 4 << 20  # total of all transcripts


@dataclass(frozen=True)
class _KeptReply:
    owner: str
    transcript: str
    expires_at: float


class SpokenReplies:
    """Transcripts of spoken replies, limited in number and size, each stored until it expires.

    The audio is not stored: the model gets only the text of its earlier speech. A lock guards all
    fields.
    """

    def __init__(self, most: int, seconds: float, now: Callable[[], float] = time.time):
        self._most, self._seconds, self._now = most, seconds, now
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _KeptReply] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._kept)

    def named(self, completion_id: str) -> tuple[str, int]:
        """Return a new reply's id, from its completion's, and its time of expiry since 1970."""
        audio_id = _AUDIO + completion_id.removeprefix(_COMPLETION)
        return audio_id, int(self._now() + self._seconds)

    def keep(self, audio_id: str, expires_at: int, owner: str, transcript: str) -> None:
        """Store the transcript of a complete reply, to which its owner alone may refer."""
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

    def transcript(self, audio_id: str, owner: str) -> str | None:
        """Return the transcript of a reply; None if it is not stored or has another owner."""
        with self._lock:
            kept = self._kept.get(audio_id)
            if kept is not None and kept.owner == owner and kept.expires_at > self._now():
                return kept.transcript
        return None

    def delete(self, completion_id: str, owner: str) -> bool:
        """Delete a reply by its completion's id. Returns whether it was stored for this owner."""
        audio_id, _ = self.named(completion_id)
        with self._lock:
            kept = self._kept.get(audio_id)
            if kept is None or kept.owner != owner:
                return False
            del self._kept[audio_id]
            self._characters -= len(kept.transcript)
            return True
