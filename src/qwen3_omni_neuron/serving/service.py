"""Objects shared by a server's endpoints."""

import asyncio
from collections import deque
from typing import Any

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import OptionError, PromptTooLongError, ToolCallError
from qwen3_omni_neuron.helpers.media import DecodingPool
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.fetching import Fetcher
from qwen3_omni_neuron.serving.edge.keys import Keys, RequestRates
from qwen3_omni_neuron.serving.edge.quotas import Account, Quota
from qwen3_omni_neuron.serving.edge.readers import Readers
from qwen3_omni_neuron.serving.kept import KeptResponses, SpokenReplies
from qwen3_omni_neuron.serving.metrics import Metrics
from qwen3_omni_neuron.serving.model import ServedModel
from qwen3_omni_neuron.serving.openai.errors import ApiError, api_error_of
from qwen3_omni_neuron.serving.openai.fields import Voices, sent_without_effect
from qwen3_omni_neuron.serving.settings import ServerSettings


class Turnstile:
    """Admits one task per round of the event loop.

    All requests' frames are computed together, so their chunks arrive together, and each takes the
    event loop a third of a millisecond. If all but first chunks take turns, a new request, or a
    first chunk, waits for one chunk instead of eight.
    """

    def __init__(self) -> None:
        self._taken = False  # a task has had this round's turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn, in the order of calls."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # pass on the turn
                    self._next()
                raise
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                return
        self._taken = False


class Service:
    """Model, settings, metrics, limits, and replies for later turns.

    decoder: pool of processes that decode media. Quotas: held: bytes of all requests and sessions;
    requests: running and waiting; sessions: realtime.
    """

    def __init__(self, settings: ServerSettings, fetcher: Fetcher | None = None):
        """fetcher: default: one with the system's resolver."""
        share, kept = settings.share_of_owner, (settings.kept_replies, settings.kept_reply_s)
        self.settings = settings
        self.model = model = ServedModel(settings.model_name, settings.stall_timeout_s)
        self.metrics = Metrics(model)
        self.keys, self.rates = Keys(settings.api_keys), RequestRates(settings.requests_per_minute)
        self.fetcher = fetcher or Fetcher(settings)
        self.decoder = DecodingPool(
            settings.decoders, settings.decoder_bytes, settings.decode_timeout_s
        )
        self.turnstile = Turnstile()
        self.held = Quota("bytes", settings.max_held_bytes, share, "too_many_bytes")
        self.requests = Quota("requests", lambda: model.most_requests, share, "queue_full", 429)
        self.sessions = Quota(
            "realtime sessions", settings.max_realtime_sessions, share, "too_many_sessions"
        )
        self.readers = Readers(self.requests.has_others)
        self.replies = SpokenReplies(*kept, share)
        self.responses = KeptResponses(*kept, settings.max_kept_response_bytes, share, self.held)

    def failed(self, error: Exception, context: Context) -> ApiError:
        """Return the client's error for an exception of a request.

        Logs a server's error with the request's id, and fails the model if it has died.
        """
        self.model.noticed(error)
        if isinstance(error, ToolCallError):
            self.metrics.failed_calls.inc()
        refusal = api_error_of(error, context.param)
        if isinstance(error, PromptTooLongError) and self.model.omni is not None:
            most = self.model.omni.info.context_length
            begin = f"This model's maximum context length is {most} tokens. However, the "
            begin += "prompt is too long: "  # clients recognise these words
            refusal.message = begin + refusal.message
        if refusal.code == "internal_error":
            extra = {"request_id": context.request_id}
            logs.logger.error("failed", exc_info=error, extra=extra)
        return refusal

    def voices_of(self, omni: Qwen3Omni) -> Voices:
        """Return a model's voices by every name.

        Raises OptionError if an alias names a voice that the model lacks.
        """
        return Voices(omni.info.speakers, self.settings.voice_aliases)

    def checked(self, omni: Qwen3Omni) -> Qwen3Omni:
        """Return a model that fits the settings; otherwise close it and raise OptionError."""
        try:
            self.voices_of(omni)
        except OptionError:
            omni.close()
            raise
        return omni

    def count_without_effect(self, path: str, given: Any) -> None:
        """Count a client's fields without effect; see `sent_without_effect`."""
        for name in dict.fromkeys(sent_without_effect(path, given, self.model.name)):
            self.metrics.without_effect.labels(path, name).inc()
        skipped = getattr(given, "skipped", ())
        if skipped:
            self.metrics.without_effect.labels(path, "tools[]").inc(len(skipped))
            types = ", ".join(dict.fromkeys(skipped))[:400]
            logs.logger.info("tools_skipped", extra={"path": path, "types": types})

    def close(self) -> None:
        """End the threads and the model."""
        self.readers.close()
        self.model.close()

    def account_of_request(self, owner: str) -> Account:
        """Open the account of one request."""
        most = self.settings.max_request_bytes

        def refusal(size: int) -> ApiError:
            return ApiError(
                413,
                f"the request needs {size} bytes of memory, decoded media included; the limit is "
                f"{most}. Send fewer or smaller media.",
                "request_too_large",
            )

        return Account(self.held, owner, most, refusal)

    def account_of_session(self, owner: str) -> Account:
        """Open the account of one realtime session."""
        most = self.settings.max_realtime_bytes

        def refusal(size: int) -> ApiError:
            return ApiError(
                400,
                f"the session would have {size} bytes of items, sound and text; the limit is "
                f"{most}. Delete items, clear the buffer, or begin another session.",
                "session_too_large",
            )

        return Account(self.held, owner, most, refusal)
