"""Metrics of the server for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.events import SpeechResult
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.serving.model import ServedModel

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FACTORS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.5, 2, 5)
_PREFIX = "qwen3_omni_"


class Metrics:
    """Counters and histograms of one server, in their own registry."""

    def __init__(self, model: ServedModel):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=buckets, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=registry)

        self.requests = counter("requests", "Requests by path and status", "path", "status")
        self.in_progress = gauge("requests_in_progress", "Requests being answered")
        self.realtime_sessions = gauge("realtime_sessions", "Open realtime sessions")
        self.seconds = histogram("request_seconds", "Duration of a request")
        self._queued = histogram("queued_seconds", "Time in the queue for a slot")
        self._ttft = histogram("ttft_seconds", "Time to the first text token")
        self._ttfb = histogram("ttfb_seconds", "Time to the first sample of speech")
        self._rtf = histogram("rtf", "Time of a reply's speech over its duration", _FACTORS)
        self._underruns = counter("underruns", "Underruns of playback")
        self._silent = counter("underrun_seconds", "Silence in underruns")
        self._tokens = counter("tokens", "Tokens by kind", "kind")
        self._frames = counter("frames", "Codec frames of speech, of 80 ms each")
        self._audio = counter("audio_seconds", "Duration of the generated speech")
        self._finished = counter("replies", "Replies by finish reason of the text", "reason")
        self._runaway = counter("runaway_replies", "Replies whose runaway speech was ended")
        self.failed_calls = counter("tool_calls_failed", "Replies ended by a malformed tool call")
        self.without_effect = counter(
            "fields_without_effect", "Fields sent without effect", "path", "field"
        )
        registry.register(_ModelFigures(model))

    def finished(self, result: SpeechResult, playback: Playback) -> None:
        """Count a complete reply."""
        timings = result.timings
        self._finished.labels(result.thinker_finish_reason).inc()
        if result.talker_finish_reason == "runaway":
            self._runaway.inc()
        self._queued.observe(timings.queued_s)
        if timings.prompt_tokens:  # else the request passed the text
            self._ttft.observe(timings.ttft_s)
            self._tokens.labels("reused").inc(timings.reused_tokens)
        if timings.ttfb_s is not None:
            self._ttfb.observe(timings.ttfb_s)
        if timings.rtf is not None:
            self._rtf.observe(timings.rtf)
        self._underruns.inc(playback.underruns)
        self._silent.inc(playback.silent_s)
        self._tokens.labels("prompt").inc(timings.prompt_tokens)
        self._tokens.labels("text").inc(timings.text_tokens)
        self._frames.inc(timings.frames)
        self._audio.inc(timings.audio_s)


class _ModelFigures(Collector):
    """Metrics that are read from the model at each scrape."""

    def __init__(self, model: ServedModel):
        self._model = model

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        info = GaugeMetricFamily(_PREFIX + "info", "Version and model", labels=("version", "model"))
        info.add_metric((__version__, self._model.name), 1)
        ready = GaugeMetricFamily(
            _PREFIX + "ready", "1 if requests are answered", value=int(self._model.ready)
        )
        omni = self._model.omni
        if omni is None:
            return [info, ready]
        status = omni.status()
        calls = CounterMetricFamily(
            _PREFIX + "stage_calls", "Calls of a stage's engine", labels=("stage",)
        )
        busy = CounterMetricFamily(
            _PREFIX + "stage_busy_seconds", "Time in a stage's engine", labels=("stage",)
        )
        for name, stage in status.stages.items():
            calls.add_metric((name,), stage.calls)
            busy.add_metric((name,), stage.busy_s)
        slots = {
            "slots": ("Most concurrent requests", omni.info.slots),
            "slots_used": ("Running requests", status.running),
            "queue_length": ("Requests waiting for a slot", status.queued),
        }
        gauges = [GaugeMetricFamily(_PREFIX + n, text, value=v) for n, (text, v) in slots.items()]
        return [info, ready, *gauges, calls, busy]
