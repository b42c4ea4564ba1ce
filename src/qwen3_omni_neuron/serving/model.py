"""The server's model and its state: loading, ready, stalled, draining, or failed."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.engines.process.heap import IdleMemory, keep_all, trim_early
from qwen3_omni_neuron.errors import BusyError, EngineDiedError, NotInstalledError
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError

State = Literal["loading", "ready", "stalled", "draining", "failed"]
LOADING_RETRY_S = 10
LOOK_S = 0.25  # interval of the checks in `watch`
FAILED_DRAIN_S = 5.0  # a dead model's requests end immediately
CLOSE_S = 10.0  # for the model's threads and processes to end
SWITCH_S = 0.0002  # longest wait of a reply's thread for a request's reader
_QUESTION = [{"role": "user", "content": "Hello"}]


class ServedModel:
    """A model, perhaps still loading. Only the event loop changes the fields.

    stall_timeout_s: limit of one engine call. on_failure: called once, in the event loop, when a
    process or thread of the model has died.
    """

    def __init__(self, name: str, stall_timeout_s: float):
        self.name, self.created = name, time.time()
        self.omni: Qwen3Omni | None = None
        self.most_requests = 0  # upper bound of running and waiting requests
        self.on_failure: Callable[[], None] | None = None
        self._state: State = "loading"
        self._stall_timeout_s = stall_timeout_s
        self._sessions_until_s: float | None = None
        self._idle_memory = IdleMemory()

    @property
    def state(self) -> State:
        """State of the model.

        "loading" until `loaded`; "stalled" while an engine call takes too long; "draining" once new
        requests are refused; "failed" once a process or thread of it has died: restart the server.
        """
        return "stalled" if self._state == "ready" and self._stall() else self._state

    @property
    def ending(self) -> bool:
        """True if new requests are refused for good."""
        return self._state in ("draining", "failed")

    @property
    def ready(self) -> bool:
        """True if requests are answered."""
        return self.state == "ready"

    @property
    def fault(self) -> str | None:
        """Why this process must be restarted, or None."""
        if self._state == "failed":
            return (
                "a process or thread of the model has died. Restart the server; its log says why, "
                "at model_died."
            )
        stall = self._stall()
        if stall is None:
            return None
        stage, seconds = stall
        return (
            f"an engine call of the {stage} has run for {seconds:.0f} s, but stall_timeout_s is "
            f"{self._stall_timeout_s:g} s. Restart the server; if calls are that slow, raise it."
        )

    def _stall(self) -> tuple[str, float] | None:
        """Return the stage whose call exceeds the limit, and the seconds so far."""
        if self.omni is None:
            return None
        calls = {name: stage.call_s for name, stage in self.omni.status().stages.items()}
        stage = max(calls, key=calls.__getitem__)
        return (stage, calls[stage]) if calls[stage] > self._stall_timeout_s else None

    def loaded(self, omni: Qwen3Omni) -> None:
        """Set the model, and accept requests."""
        info = omni.info
        self.most_requests = info.slots + info.max_queued
        self.omni = omni
        if self._state == "loading":
            self._state = "ready"

    def drain(self, within_s: float) -> None:
        """Refuse new requests and sessions, and end open sessions within `within_s`."""
        self.end_sessions(within_s)
        if self._state != "failed":
            self._state = "draining"

    def end_sessions(self, within_s: float) -> None:
        """Refuse new realtime sessions, and end the open ones within `within_s`."""
        if self._sessions_until_s is None:
            self._sessions_until_s = time.monotonic() + within_s

    def keep_sessions(self) -> None:
        """Accept realtime sessions again, unless the process ends."""
        if self._state == "ready":
            self._sessions_until_s = None

    @property
    def sessions_end_in_s(self) -> float | None:
        """Seconds until realtime sessions must end, None while they may continue."""
        if self._sessions_until_s is None:
            return None
        return max(0.0, self._sessions_until_s - time.monotonic())

    def noticed(self, error: BaseException) -> None:
        """Set the state to "failed" if a request's error means that the model died."""
        if isinstance(error, EngineDiedError):
            self._fail(str(error))

    async def watch(self) -> None:
        """Poll forever whether the model died, and free idle memory."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.omni is None:
                continue
            status = self.omni.status()
            if status.fault is not None:
                self._fail(status.fault)
            if not status.running and not status.queued:
                with suppress(RuntimeError):  # no more threads are available
                    await asyncio.to_thread(self._idle_memory.look)

    def _fail(self, reason: str) -> None:
        if self._state != "failed":
            self._state = "failed"
            logs.event("model_died", logging.ERROR, reason=reason)
            self.end_sessions(FAILED_DRAIN_S)
            if self.on_failure is not None:
                self.on_failure()

    def take(self) -> Qwen3Omni:
        """Return the model. Raises ApiError 503 if it is not ready."""
        state = self.state
        if self.omni is not None and state == "ready":
            return self.omni
        raise ApiError(
            503,
            f"the server is {state}. Try again later.",
            f"model_{state}",
            retry_after_s=LOADING_RETRY_S if state == "loading" else RETRY_S,
        )

    def close(self) -> None:
        """End the model. Abandon it if a call hangs."""
        if self.omni is not None:
            closing = threading.Thread(target=self.omni.close, name="close", daemon=True)
            closing.start()
            closing.join(CLOSE_S)


def load_and_answer(model: str, **load: Any) -> Qwen3Omni:
    """Load a model and generate a short reply, to find errors of computation before `ready`.

    load: arguments of Qwen3Omni.load. Raises its and a request's errors. For a server's process:
    sets malloc, the garbage collector and the threads' switch interval (engines.process.heap).
    """
    trim_early()
    omni = Qwen3Omni.load(model, **load)
    try:
        reply = omni.generate_audio if omni.info.speakers else omni.generate_text
        reply(_QUESTION, cache_key="", thinker_max_new_tokens=1, talker_max_new_tokens=2)
        # The first grammar reads the vocabulary: replies would stop for a second or two.
        with suppress(NotInstalledError, BusyError):
            omni.generate_text(_QUESTION, cache_key="", grammar={"regex": "a"})
    except BaseException:
        omni.close()
        raise
    keep_all()
    sys.setswitchinterval(SWITCH_S)
    return omni
