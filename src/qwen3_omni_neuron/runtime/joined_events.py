"""The events of requests that are spoken one after another, such as the pieces of a long text."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    FinishReason,
    SpeechResult,
    Timings,
)
from qwen3_omni_neuron.runtime.buffers import Item
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from qwen3_omni_neuron.runtime.request_events import RequestEvents


class JoinedEvents:
    """Events of one or more requests as those of one reply, with its result.

    Each request but the first is submitted before the one before it has ended, whose slot it takes.
    part: events of the request that is read now. queue_position: see `Pipeline.submit`.
    """

    def __init__(self, pipeline: Pipeline, first: Request, later: Sequence[Request] = ()):
        self._pipeline, self._clock = pipeline, pipeline.clock
        live, self.queue_position = pipeline.submit(first)
        self.part = RequestEvents(live, self._clock)
        self._lives = [live]  # requests whose events were taken, the current one last
        self._later = deque(later)
        self._next: LiveRequest | None = None
        self._texts: list[str] = []
        self._chunks: list[AudioChunk] = []
        self._first_sample = 0  # index in the reply of the current part's first sample
        self._closed = False
        self._submit_next()

    def event_of(self, item: Item | None) -> Event | None:
        """Return the event of an item of `part`; None where there is none yet.

        item: None after the last one of `part`.
        """
        if item is None:
            return None if self._go_on() else Finished(self._result())
        event = self.part.event_of(item)
        if isinstance(event, AudioChunk):
            event = self._joined(event)
            self._chunks.append(event)
        elif event is not None:
            self._texts.append(event.text)
        return event

    @property
    def at_end(self) -> bool:
        """True where the last request has ended well, and all of its items were taken."""
        return self.part.at_end and self._next is None

    def close(self) -> None:
        """Cancel the requests."""
        self._closed = True
        self._pipeline.cancel(self.part.live)
        if self._next is not None:
            self._pipeline.cancel(self._next)

    def _joined(self, chunk: AudioChunk) -> AudioChunk:
        """Return a chunk of this part with its place in the whole reply.

        Each part's audio is shorter than its frames by the vocoder's latency, 23 ms. Silence of
        that length is put between two parts, so that the reply is as long as its frames.
        """
        if len(self._lives) == 1:
            return chunk
        samples, first_sample = chunk.samples, chunk.first_sample + self._first_sample
        gap = self._pipeline.latency_samples if self._first_sample else 0
        if chunk.first_sample:
            first_sample += gap
        else:
            samples = np.concatenate((np.zeros(gap, np.float32), samples))
        return replace(chunk, samples=samples, first_sample=first_sample)

    def _go_on(self) -> bool:
        """Go on with the next request, where there is one, and submit the one after it."""
        if self._next is None:
            return False
        written = self._next.request.written
        self.part = RequestEvents(self._next, self._clock, written.before if written else "")
        self._lives.append(self._next)
        self._first_sample = sum(len(chunk.samples) for chunk in self._chunks)
        self._submit_next()
        return True

    def _submit_next(self) -> None:
        self._next = None
        if self._later:
            request = replace(self._later.popleft(), arrived_s=self._clock.now())
            self._next, _ = self._pipeline.submit(request, after=self.part.live)
        if self._closed:  # by another thread meanwhile
            self.close()

    def _result(self) -> SpeechResult:
        lives, frames = self._lives, [codes for live in self._lives for codes in live.codes]
        # numpy's concatenate would release the interpreter lock, and delay the reply's end.
        audio = np.frombuffer(
            bytearray().join(chunk.samples.data for chunk in self._chunks), np.float32
        )
        codes = np.frombuffer(bytearray().join(codes.data for codes in frames), np.int64)
        reasons = {live.talker_finish for live in lives}
        cut: tuple[FinishReason, ...] = ("length", "runaway")
        return SpeechResult(
            text="".join(self._texts),
            token_ids=[token_id for live in lives for token_id in live.token_ids],
            codes=codes.reshape(len(frames), self._pipeline.code_groups),
            audio=audio,
            sample_rate=SAMPLE_RATE,
            thinker_finish_reason=lives[-1].thinker_finish,
            talker_finish_reason=next(
                (reason for reason in cut if reason in reasons), lives[-1].talker_finish
            ),
            timings=self._timings(len(audio) / SAMPLE_RATE),
            seed=lives[0].seed,
            logprobs=[logprob for live in lives for logprob in live.logprobs],
            redrawn=any(live.redrawn for live in lives),
        )

    def _timings(self, audio_s: float) -> Timings:
        lives, live = self._lives, self._lives[0]
        times, request = live.timestamps, live.request
        assert times.admitted_s is not None and times.first_token_s is not None
        firsts = [live.timestamps.first_sample_s for live in lives]
        lasts = [live.timestamps.last_sample_s for live in lives]
        first = next((first_s for first_s in firsts if first_s is not None), None)
        last = next((last_s for last_s in reversed(lasts) if last_s is not None), None)
        arrived_s = request.arrived_s
        speech_s = {name: sum(live.speech_s[name] for live in lives) for name in live.speech_s}
        slow = max(speech_s, key=lambda name: speech_s[name])
        slow_stage = slow if 0 < audio_s < speech_s[slow] else None
        slow_speech = None
        if slow_stage is not None:
            slow_speech = self._pipeline.tell_slow_speech(lives, slow, speech_s[slow], audio_s)
        self._pipeline.warn_of_pages_read()
        return Timings(
            queued_s=times.admitted_s - arrived_s,
            ttft_s=times.first_token_s - arrived_s,
            ttfb_s=None if first is None else first - arrived_s,
            total_s=self._clock.now() - arrived_s,
            audio_s=audio_s,
            rtf=None if last is None else (last - arrived_s) / audio_s,
            prompt_tokens=0 if request.written else len(request.prompt),
            reused_tokens=live.cached_rows,
            text_tokens=sum(len(live.token_ids) for live in lives),
            frames=sum(len(live.codes) for live in lives),
            prompt_audio_tokens=request.prompt.audio_tokens,
            prompt_image_tokens=request.prompt.image_tokens,
            speech_s=speech_s,
            slow_stage=slow_stage,
            slow_speech=slow_speech,
        )
