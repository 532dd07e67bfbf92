"""GetTelemetrySubscriptions, version 0 (KIP-714): names the metrics that the client is to push, and the interval.

It needs no permission, as in Kafka. Differences from Apache Kafka: it is always served, not only with a plugin, because the
metrics go to this broker's own; and counters are asked for as totals, not as differences.
"""

from __future__ import annotations

import datetime
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.telemetry.client_instances import TelemetryRefused
from stratalog_broker.telemetry.service import PUSH_BYTES_MAX, ClientTelemetry
from stratalog_core.batches.compression import GZIP, LZ4, SNAPPY, ZSTD

_CODECS: Final = (ZSTD, LZ4, GZIP, SNAPPY)
"""In the order in which clients should prefer them."""


async def handle(context: RequestContext, request: Any, *, telemetry: ClientTelemetry) -> Any:
    try:
        instance = telemetry.subscription_of(request.client_instance_id, context.client_fields())
    except TelemetryRefused:
        return _response(context, error_code=ErrorCode.throttling_quota_exceeded)
    return _response(
        context,
        error_code=ErrorCode.none, client_instance_id=instance.instance_id, subscription_id=instance.subscription_id,
        accepted_compression_types=_CODECS, push_interval=datetime.timedelta(milliseconds=instance.asked.interval_ms),
        telemetry_max_bytes=PUSH_BYTES_MAX, requested_metrics=instance.asked.metrics,
    )  # fmt: skip


def _response(context: RequestContext, **fields: Any) -> Any:
    nothing = {
        "client_instance_id": None, "subscription_id": 0, "accepted_compression_types": (),
        "push_interval": datetime.timedelta(0), "telemetry_max_bytes": 0, "requested_metrics": (),
    }  # fmt: skip
    return context.new("GetTelemetrySubscriptionsResponse", **{**nothing, "delta_temporality": False, **fields})


API: Final = HandlerInfo(
    key=71, min_version=0, max_version=0, handle=handle, access=Access(Operation.DESCRIBE, Resource.CLUSTER)
)
