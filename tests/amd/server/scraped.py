"""The contents of a scrape of /metrics, by Prometheus' own parser."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families_of(text: str) -> dict[str, Metric]:
    """Returns the metrics by name; that of a counter is without its _total."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def value_of(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Returns the value of the sample with these labels and no others."""
    (value,) = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == name and each.labels == labels
    ]
    return value
