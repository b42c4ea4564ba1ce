"""Figures of a replica in Ray's own metrics, which every node exports for Prometheus."""

from prometheus_client import CollectorRegistry
from ray.serve import metrics


class Figures:
    """Copies of all samples of a registry, as gauges that bear the replica's name.

    A sample keeps its name and labels, and Ray puts `ray_` before it and adds the labels
    application, deployment and replica. Gauges, since a counter of Ray's can't be set, nor a
    histogram: rates and quantiles are computed from their samples all the same.
    """

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
        self._gauges: dict[str, metrics.Gauge] = {}

    def copy(self) -> None:
        """Give Ray the values that the samples have now."""
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
