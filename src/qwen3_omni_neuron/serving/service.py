"""Objects that the endpoints of one server share."""

from dataclasses import dataclass

from qwen3_omni_neuron.serving.fetching import Fetcher
from qwen3_omni_neuron.serving.keys import Rates
from qwen3_omni_neuron.serving.metrics import Metrics
from qwen3_omni_neuron.serving.model import ServedModel
from qwen3_omni_neuron.serving.replies import SpokenReplies
from qwen3_omni_neuron.serving.settings import ServerSettings
from qwen3_omni_neuron.serving.turnstile import Turnstile


@dataclass(frozen=True)
class Service:
    """Model, settings, figures, rates, turns, and the replies that later turns may name."""

    settings: ServerSettings
    model: ServedModel
    metrics: Metrics
    replies: SpokenReplies
    fetcher: Fetcher
    rates: Rates
    turnstile: Turnstile

    @staticmethod
    def of(settings: ServerSettings, fetcher: Fetcher | None = None) -> "Service":
        """Make the parts. fetcher: by default one that asks the system for addresses."""
        model = ServedModel(settings.model_name, settings.threads, settings.stall_timeout_s)
        return Service(
            settings,
            model,
            Metrics(model),
            SpokenReplies(settings.kept_replies, settings.kept_reply_s),
            fetcher or Fetcher(settings),
            Rates(settings.requests_per_minute),
            Turnstile(),
        )
