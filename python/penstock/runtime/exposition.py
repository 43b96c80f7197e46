"""Reads metrics in Prometheus's text format, and gives them the names that all engines share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["parsed", "with_common_names"]

#: Counters with this name in the text, of which the parser adds `_total` to the names of the samples.
_COUNTER = re.compile(r"^# TYPE (\S+) counter\s*$", re.MULTILINE)


def parsed(text: str) -> dict[str, Metric]:
    """The families of a text by name, each sample once."""
    found: dict[str, Metric] = {}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    plain = {name for name in _COUNTER.findall(text) if not name.endswith("_total")}
    for family in text_string_to_metric_families(text):
        name, kind = family.name, family.type
        is_plain = kind == "counter" and name in plain
        kind = "unknown" if is_plain else kind  # otherwise the name would end with _total
        metric = found.get(name)
        if metric is None:
            metric = found[name] = Metric(name, family.documentation, kind)
        elif metric.type != kind:
            continue
        for sample in family.samples:
            plain_name = sample.name.removesuffix("_total") if is_plain else sample.name
            key = (plain_name, tuple(sorted(sample.labels.items())))
            if key not in seen:
                seen.add(key)
                metric.samples.append(sample._replace(name=plain_name))
    return found


def with_common_names(found: Mapping[str, Metric], rules: Mapping[str, Sequence[str]]) -> dict[str, Metric]:
    """The families, and copies of those that have a common name."""
    families = dict(found)
    for target, sources in rules.items():
        for source in sources:
            # A counter without a type has the name of its samples.
            metric = found.get(source) or found.get(f"{source}_total")
            if metric is not None:
                name = target + metric.name.removeprefix(source)
                copy = families[name] = Metric(name, metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(name=target + sample.name.removeprefix(source))
                    for sample in metric.samples
                ]
                break
    return families
