"""Decodes pushed metrics: OpenTelemetry's ``MetricsData`` in protobuf, compressed with one of Kafka's codecs.

Counters and gauges are taken; histograms, which no Kafka client pushes, are not. Sizes and counts are bounded. Everything here
runs in a thread: protobuf is loaded there, too, when the first client pushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from stratalog_core.batches.compression import NONE, decompress
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

SAMPLES_MAX: Final = 1_000
"""Values that are taken from one push. A Java client with a hundred topics has a few hundred."""
TEXT_CHARACTERS_MAX: Final = 200
_DELTA: Final = 1
_INTEGER: Final = "as_int"


class Sample(NamedTuple):
    """A value. ``attributes`` is text: ``key=value`` pairs sorted by key. ``is_delta``: it adds to the values before it."""

    metric: str
    attributes: str
    value: float
    is_delta: bool


def decode_metrics(content: Buffer, codec: int, bytes_max: int) -> list[Sample]:
    """Return the samples of a push, ``SAMPLES_MAX`` at most. Raises ``Corrupt``, also for more than ``bytes_max``."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    plain = bytes(content) if codec == NONE else decompress(codec, content, bytes_max)
    try:
        pushed = MetricsData.FromString(plain)
    except DecodeError as malformed:
        raise Corrupt(f"pushed metrics are not OpenTelemetry's MetricsData: {malformed}") from malformed
    samples: list[Sample] = []
    for sample in _samples(pushed):
        if len(samples) == SAMPLES_MAX:
            break
        samples.append(sample)
    return samples


def _samples(pushed: Any) -> Iterator[Sample]:
    for of_resource in pushed.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                if kind in ("sum", "gauge"):
                    is_delta = kind == "sum" and metric.sum.aggregation_temporality == _DELTA
                    yield from _points(metric.name, getattr(metric, kind).data_points, is_delta=is_delta)


def _points(metric: str, points: Iterable[Any], *, is_delta: bool) -> Iterator[Sample]:
    for point in points:
        value = point.as_int if point.WhichOneof("value") == _INTEGER else point.as_double
        attributes = sorted(f"{one.key}={_text(one.value)}" for one in point.attributes)
        text = ",".join(attributes)[:TEXT_CHARACTERS_MAX]
        yield Sample(metric[:TEXT_CHARACTERS_MAX], text, float(value), is_delta)


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    return str(getattr(value, kind)) if kind is not None else ""
