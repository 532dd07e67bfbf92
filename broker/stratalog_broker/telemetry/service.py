"""Client telemetry of one broker (KIP-714): gives clients their subscriptions, takes their metrics, yields them to a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final
from uuid import UUID

from stratalog_broker.metrics import TelemetryMetrics
from stratalog_broker.telemetry.client_instances import ClientInstance, ClientInstances
from stratalog_broker.telemetry.otlp import decode_metrics
from stratalog_broker.telemetry.pushed_metrics import PushedMetrics
from stratalog_broker.telemetry.subscriptions import Subscriptions
from stratalog_core.batches.compression import decompression_bytes
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Buffer, Clock, Random
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.client.api import MetadataView

PUSH_BYTES_MAX: Final = 1024 * 1024
"""Of one push, compressed and not (Kafka's default of ``telemetry.max.bytes``)."""
_DECODED_FACTOR: Final = 8
"""Bytes of decoded metrics per byte of protobuf, at most."""


class ClientTelemetry:
    """Follows the view until ``close``."""

    def __init__(self, view: MetadataView, pool: SearchPool, clock: Clock, random: Random) -> None:
        self._pool = pool
        self._clock = clock
        self._subscriptions = Subscriptions(view)
        self._instances = ClientInstances(self._subscriptions, random)
        self._pushed = PushedMetrics()
        self._counts = TelemetryMetrics()

    def subscription_of(self, instance_id: UUID | None, client: Mapping[str, str]) -> ClientInstance:
        """Return the instance with what it is to push; None: a new one. Raises ``TelemetryRefused``."""
        return self._instances.get(instance_id, client, self._now_ms())

    async def push(
        self, instance_id: UUID, subscription_id: int, client: Mapping[str, str], content: Buffer, codec: int, *, is_last: bool
    ) -> None:
        """Take the metrics of an instance, at most ``PUSH_BYTES_MAX``.

        Raises ``TelemetryRefused``, ``Corrupt`` (not metrics, or too many when decompressed), ``Overloaded``.
        """
        try:
            self._instances.push(instance_id, subscription_id, client, self._now_ms(), is_last=is_last)
            samples = []
            if content:
                memory_bytes = decompression_bytes(codec, content) + _DECODED_FACTOR * PUSH_BYTES_MAX
                samples = await self._pool.run(memory_bytes, lambda _: decode_metrics(content, codec, PUSH_BYTES_MAX))
        except BaseException:
            self._counts.refused_pushes += 1
            raise
        self._counts.pushes += 1
        self._pushed.put(instance_id, client["client_id"], samples)

    def metrics(self) -> Iterator[MetricGroup]:
        """Yield the metrics of telemetry itself and the values of clients that have pushed lately."""
        self._instances.expire(self._now_ms())
        self._pushed.keep(self._instances.__contains__)
        self._counts.client_instances = len(self._instances)
        self._counts.dropped_values = self._pushed.dropped
        yield self._counts
        yield from self._pushed.metrics()

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def close(self) -> None:
        """Stop following the view."""
        self._subscriptions.close()
