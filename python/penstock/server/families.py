"""Metric families that are filled one sample after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    import penstock
    from penstock.server.measures import Distribution

__all__ = ["Families"]


class Families:
    """Metric families by name; those of several models have one sample or more for each."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def _family(self, kind: str, name: str, text: str | None) -> Metric:
        family = self.by_name.get(name)
        if family is None:
            family = self.by_name[name] = Metric(name, text or name, kind)
        return family

    def gauge(self, name: str, text: str | None, labels: dict[str, str], value: float) -> None:
        """Add a current value."""
        self._family("gauge", name, text).add_sample(name, labels, value)

    def counter(self, name: str, text: str | None, labels: dict[str, str], value: float) -> None:
        """Add a total; its sample has the suffix `_total`."""
        self._family("counter", name, text).add_sample(f"{name}_total", labels, value)

    def histogram(
        self,
        name: str,
        text: str | None,
        labels: dict[str, str],
        found: penstock.Histogram | Distribution,
    ) -> None:
        """Add a distribution."""
        family = self._family("histogram", name, text)
        count = 0
        bounds = (*map(floatToGoString, found.buckets), "+Inf")
        for bound, added in zip(bounds, found.counts, strict=True):
            count += added
            family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{name}_count", labels, count)
        family.add_sample(f"{name}_sum", labels, found.sum)
