"""PushTelemetry, version 0 (KIP-714): takes a client's metrics, which this broker shows among its own.

It needs no permission, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.telemetry.client_instances import Refusal, TelemetryRefused
from stratalog_broker.telemetry.service import PUSH_BYTES_MAX, ClientTelemetry
from stratalog_core.batches.compression import NAMES
from stratalog_core.errors import Corrupt, Overloaded

_CODES: Final[Mapping[Refusal, ErrorCode]] = {
    Refusal.TOO_EARLY: ErrorCode.throttling_quota_exceeded,
    Refusal.TERMINATED: ErrorCode.invalid_request,
    Refusal.UNKNOWN_SUBSCRIPTION: ErrorCode.unknown_subscription_id,
}


async def handle(context: RequestContext, request: Any, *, telemetry: ClientTelemetry) -> Any:
    return context.new("PushTelemetryResponse", error_code=await _push(context, request, telemetry))


async def _push(context: RequestContext, request: Any, telemetry: ClientTelemetry) -> ErrorCode:
    if request.client_instance_id is None:
        return ErrorCode.invalid_request
    if request.compression_type not in NAMES.values():
        return ErrorCode.unsupported_compression_type
    if len(request.metrics) > PUSH_BYTES_MAX:
        return ErrorCode.telemetry_too_large
    try:
        await telemetry.push(
            request.client_instance_id, request.subscription_id, context.client_fields(), request.metrics,
            request.compression_type, is_last=request.terminating,
        )  # fmt: skip
    except TelemetryRefused as refused:
        return _CODES[refused.refusal]
    except Corrupt:
        return ErrorCode.invalid_record
    except Overloaded:
        return ErrorCode.throttling_quota_exceeded
    return ErrorCode.none


API: Final = HandlerInfo(
    key=72, min_version=0, max_version=0, handle=handle, access=Access(Operation.DESCRIBE, Resource.CLUSTER)
)
