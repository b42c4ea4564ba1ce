"""A loaded model as its operator sees it: what it can do, and what it does now."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """Abilities and sizes of a loaded model.

    speakers: names of its voices; none where it has no talker. thinks: its template lets each reply
    begin with reasoning, which ends with </think>. takes_tools: its template shows tools to the
    model. slots: requests that run at a time; max_queued: that wait for a slot. context_length:
    positions of a slot's KV cache.
    """

    speakers: tuple[str, ...]
    thinks: bool
    takes_tools: bool
    slots: int
    max_queued: int
    context_length: int


@dataclass(frozen=True)
class StageTime:
    """Calls of a stage's engine since the model was loaded, and their time in seconds.

    call_s: time of the call that is in progress now; 0 where there is none.
    """

    calls: int
    busy_s: float
    call_s: float = 0.0


@dataclass(frozen=True)
class Status:
    """Work of a loaded model now.

    running: requests in a slot. queued: requests that wait for one. stages: by the names thinker,
    talker and vocoder. fault: why a stage can't work any more, so that the model has to be loaded
    again: its process or its thread has ended. None where all can.
    """

    running: int
    queued: int
    stages: Mapping[str, StageTime]
    fault: str | None = None
