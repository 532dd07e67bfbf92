"""The latest values that client instances pushed, as metrics of the broker. Sans-IO.

The number of series is bounded: for each client, and for all together. Series beyond a bound are dropped and counted. Clients
without values take no memory here, so their number is bounded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final
from uuid import UUID

from stratalog_broker.metrics import PushedMetric
from stratalog_broker.telemetry.otlp import Sample

SERIES_MAX: Final = 20_000
"""Of all clients, some 300 bytes each."""


class PushedMetrics:
    """Values by client instance."""

    def __init__(self) -> None:
        self._clients: dict[UUID, tuple[str, dict[tuple[str, str], float]]] = {}
        self._count = 0
        self.dropped = 0
        """Values that were not taken because ``SERIES_MAX`` was reached."""

    def __len__(self) -> int:
        """Return the number of clients that have values."""
        return len(self._clients)

    def put(self, instance_id: UUID, client_id: str, samples: Iterable[Sample]) -> None:
        """Replace or add to the values of a client, which pushes all of its metrics at once."""
        _, before = self._clients.get(instance_id, ("", {}))
        self.forget(instance_id)
        values: dict[tuple[str, str], float] = {}
        for sample in samples:
            key = sample.metric, sample.attributes
            if self._count + len(values) >= SERIES_MAX and key not in values:
                self.dropped += 1
                continue
            values[key] = sample.value + (before.get(key, 0.0) if sample.is_delta else 0.0)
        if values:
            self._clients[instance_id] = client_id, values
            self._count += len(values)

    def forget(self, instance_id: UUID) -> None:
        """Remove the values of a client; no error if it has none."""
        _, values = self._clients.pop(instance_id, ("", {}))
        self._count -= len(values)

    def keep(self, is_known: Callable[[UUID], bool]) -> None:
        """Remove the values of clients that are not known any more."""
        for instance_id in [each for each in self._clients if not is_known(each)]:
            self.forget(instance_id)

    def metrics(self) -> Iterator[PushedMetric]:
        """Yield one group for each value."""
        for instance_id, (client_id, values) in self._clients.items():
            for (metric, attributes), value in values.items():
                yield PushedMetric(
                    client_id=client_id, client_instance_id=str(instance_id), metric=metric, attributes=attributes,
                    last_value=value,
                )  # fmt: skip
