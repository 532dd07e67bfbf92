"""The reference page of metrics, from the declarations of all metric groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stratalog_bookies.metrics import AddMetrics, BookieMetrics, Counters, DiskMetrics
from stratalog_broker.metrics import (
    ApiMetrics,
    BrokerMetrics,
    MemoryMetrics,
    PushedMetric,
    ReplicaReadMetrics,
    StateUploadMetrics,
    TakeoverMetrics,
    TelemetryMetrics,
    TopicTraffic,
)
from stratalog_core.http.loop_lag import EventLoopMetrics
from stratalog_core.http.settings import DEFAULT_PORTS
from stratalog_core.metrics.groups import MetricDefinition, MetricGroup, definitions
from stratalog_core.metrics.registry import ScrapeMetrics
from stratalog_metadata.node.metrics import QuorumMetrics, RecordMetrics, RequestCounters
from stratalog_tiering.metrics import (
    ColdReadMetrics,
    ScrubMetrics,
    SecondCopyMetrics,
    TieringCounters,
    TieringLag,
    TieringMetrics,
)

METRIC_GROUPS: Final[tuple[tuple[str, tuple[type[MetricGroup], ...]], ...]] = (
    ("Metadata nodes", (RequestCounters, QuorumMetrics, RecordMetrics)),
    ("Bookies", (Counters, BookieMetrics, DiskMetrics)),
    (
        "Brokers",
        (
            ApiMetrics,
            BrokerMetrics,
            TakeoverMetrics,
            ReplicaReadMetrics,
            StateUploadMetrics,
            MemoryMetrics,
            TopicTraffic,
            TelemetryMetrics,
            PushedMetric,
            AddMetrics,
        ),
    ),
    ("Tiering workers", (TieringCounters, TieringMetrics, TieringLag, SecondCopyMetrics, ScrubMetrics)),
    ("Cold reads of brokers", (ColdReadMetrics,)),
    ("Every process", (EventLoopMetrics, ScrapeMetrics)),
)
"""Every group that a process reports, by heading."""

_HEAD = """# Metrics

```sh
curl -s http://127.0.0.1:{port}/metrics     # stratalog up
```

Every process serves HTTP, on loopback unless `[http] listen` says otherwise; `stratalog cluster status` shows the addresses.

| path | answer |
| --- | --- |
| `/metrics` | all metrics below, in the text format of Prometheus |
| `/healthz` | 200 while the process runs its event loop |
| `/readyz` | 200 while the process serves; 503 and the reason while it starts, recovers, has no session, or stops |

- Default ports: {ports}.
- Counters start at 0 when the process starts.
- A scrape reports at most `[http] label_sets_max` label sets (such as topics) of a metric, those with the largest values;
  `stratalog_metrics_left_out_label_sets` counts the others. All scrapes within one second get the same answer.
- Processes also report what every Prometheus client does: `process_cpu_seconds_total`, `process_resident_memory_bytes`,
  `process_virtual_memory_bytes`, `process_open_fds`, `process_max_fds` and `process_start_time_seconds`.

Generated from the code by `make reference`.
"""


def metrics_page() -> str:
    """The page's text."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    names = {"stratalog": "`stratalog up`"}
    ports = ", ".join(f"{names.get(role, role)} {port}" for role, port in DEFAULT_PORTS.items())
    yield _HEAD.format(port=DEFAULT_PORTS["stratalog"], ports=ports)
    for heading, groups in METRIC_GROUPS:
        yield f"## {heading}\n"
        yield "| name | type | labels | unit | meaning |"
        yield "| --- | --- | --- | --- | --- |"
        yield from (_row(definition) for group in groups for definition in definitions(group))
        yield ""


def _row(metric: MetricDefinition) -> str:
    labels = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.meaning} |"
