"""The tables of docs/monitoring.md: every metric of /metrics and every alert, read from the code and from the rules.

python -m tests.amd.server.metrics_page writes them.
"""

import re
from collections.abc import Iterator

import yaml

from rocm_attn.step.metrics import Metrics
from rocm_lab.page_parts import with_rows
from rocm_serve.server.build import build_facts
from rocm_serve.server.http_metrics import HttpMetrics
from tests.amd.house.source_tree import ROOT
from tests.amd.server.scraped import families_of

PAGE = ROOT / "docs/monitoring.md"
MONITORING = ROOT / "docker/monitoring"


def scrape() -> str:
    """Returns the text of /metrics in a state in which every label has a value."""
    http = HttpMetrics(build={**build_facts("gfx942"), "model_name": "a model"})
    http.note("/v1/completions", 200, 1.0)
    http.refused["queue"] += 1
    http.know_keys(["a key"])
    metrics = Metrics(fallbacks={"a reason": 1})
    metrics.note_end("stop", 1.0, 3)
    return metrics.as_prometheus() + http.as_prometheus()


def served_names() -> dict[str, set[str]]:
    """The name of every sample, and its labels."""
    found: dict[str, set[str]] = {}
    for family in families_of(scrape()).values():
        for each in family.samples:
            found.setdefault(each.name, set()).update(each.labels)
    return found


def rows_of_metrics() -> Iterator[str]:
    for family in families_of(scrape()).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for each in family.samples for label in each.labels} - {"le"})
        shown = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{name}` | {family.type} | {shown} | {family.documentation.replace('|', ' ')} |\n"


def rows_of_alerts() -> Iterator[str]:
    """A row for each alert, in the order of the file."""
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            says = re.sub(r"{{ \$labels\.(\w+) }}", r"*\1*", rule["annotations"]["summary"])
            yield f"| {rule['alert']} | {rule['labels']['severity']} | {rule.get('for', 'at once')} | {says} |\n"


def with_tables(text: str) -> str:
    """Returns a page with its tables replaced by the current ones. Raises ValueError if it has no place for them."""
    return with_rows(with_rows(text, "metrics", rows_of_metrics()), "alerts", rows_of_alerts())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
