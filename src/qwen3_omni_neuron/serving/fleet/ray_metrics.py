"""Export of a replica's metrics as Ray metrics, which every node exposes to Prometheus."""

from prometheus_client import CollectorRegistry
from ray.serve import metrics


class RayMetrics:
    """Copies of all samples of a registry, as Ray gauges labelled with the replica.

    A sample keeps its name and labels; Ray adds the prefix `ray_` and the labels application,
    deployment and replica. All are gauges, since Ray's counters and histograms can't be set: rates
    and quantiles are computed from the samples in the same way.
    """

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
        self._gauges: dict[str, metrics.Gauge] = {}

    def copy(self) -> None:
        """Set Ray's gauges to the samples' current values."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    labels = tuple(sample.labels)
                    gauge = metrics.Gauge(sample.name, family.documentation, labels)
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, dict(sample.labels))
