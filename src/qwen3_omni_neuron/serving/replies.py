"""Spoken replies that a later turn may refer to by the id of their audio."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from qwen3_omni_neuron.serving.ids import new_id

MOST_CHARACTERS = 4 << 20  # total of all transcripts


@dataclass(frozen=True)
class _Kept:
    owner: str
    transcript: str
    expires_at: float


class SpokenReplies:
    """Transcripts of spoken replies, limited in number and size, each kept until it expires.

    The audio is not kept: the model gets only the text of its earlier speech. A lock guards all
    fields.
    """

    def __init__(self, most: int, seconds: float, now: Callable[[], float] = time.time):
        self._most, self._seconds, self._now = most, seconds, now
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._kept)

    def new_id(self) -> tuple[str, int]:
        """Return an id for a new reply, and its time of expiry in seconds since 1970."""
        return new_id("audio_"), int(self._now() + self._seconds)

    def keep(self, audio_id: str, expires_at: int, owner: str, transcript: str) -> None:
        """Keep the transcript of a complete reply. owner: the only owner who may refer to it."""
        with self._lock:
            self._kept[audio_id] = _Kept(owner, transcript, expires_at)
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
        """Return the transcript of a reply; None if it is not kept or has another owner."""
        with self._lock:
            kept = self._kept.get(audio_id)
            if kept is None or kept.owner != owner or kept.expires_at <= self._now():
                return None
            return kept.transcript
