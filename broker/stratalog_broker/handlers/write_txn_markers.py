"""WriteTxnMarkers (key 27), versions 1–2: a transaction's coordinator ends it in the partitions that this broker owns.

Each marker becomes a control batch in each of its partitions, and is answered when the ack quorum has it. A marker that was
already written is written again, which changes nothing: its coordinator never got the first response. A marker of an older
coordinator or an older producer epoch is refused, with Kafka's rules for each transaction version. Internal partitions take
markers, too: those of __consumer_offsets end the offsets that a transaction has committed.

The answer does not wait for a marker longer than its coordinator waits for the answer: that has the outcome of all others.

ALTER or CLUSTER_ACTION on the cluster is needed, as in Kafka: an operator ends a hanging transaction with a marker, too.

Version 2 carries the transaction version (KIP-1228); markers of version 1 belong to transactions of the versions 0 and 1.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.transactions.marker_sender import TIMEOUT_S
from stratalog_broker.partitions.internal_appends import append_now
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import produce_error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.leadership import why_not_here
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.errors import StratalogError
from stratalog_core.partition_state.producer_states import MarkerVerdict
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker
from stratalog_core.ports import Clock

_ACCESS: Final = Access(Operation.CLUSTER_ACTION, Resource.CLUSTER)
_EPOCH_RAISING_VERSION: Final = 2
ANSWER_WITHIN_S: Final = TIMEOUT_S / 2
_REFUSALS: Final = {
    MarkerVerdict.PRODUCER_FENCED: ErrorCode.invalid_producer_epoch,
    MarkerVerdict.COORDINATOR_FENCED: ErrorCode.transaction_coordinator_fenced,
}


class _Marker(NamedTuple):
    kind: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    raises_epoch: bool


async def handle(
    context: RequestContext,
    request: Any,
    *,
    partitions: Partitions,
    permissions: Permissions,
    clock: Clock,
    settings: BrokerSettings,
) -> Any:
    """Write all markers side by side; those of one partition in the order of the request."""
    is_allowed = any(permissions.allows_cluster(context, operation) for operation in (Operation.ALTER, _ACCESS.operation))
    rows: list[tuple[Any, Any, int, asyncio.Task[ErrorCode]]] = []
    for marker in request.markers:
        version = getattr(marker, "transaction_version", 0)
        kind = COMMIT if marker.transaction_result else ABORT
        made = _Marker(
            kind, marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, version >= _EPOCH_RAISING_VERSION
        )
        for topic in marker.topics:
            for index in topic.partition_indexes:
                writing = _write(partitions, clock, topic.name, index, made) if is_allowed else _denied()
                rows.append((marker, topic, index, asyncio.ensure_future(writing)))
    tasks = [task for *_, task in rows]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=min(settings.append_timeout_ms / 1000, ANSWER_WITHIN_S))
    finally:
        for task in tasks:
            task.cancel()
    return _response(context, request, {(id(marker), id(topic), index): _code(task) for marker, topic, index, task in rows})


def _code(task: asyncio.Task[ErrorCode]) -> ErrorCode:
    return task.result() if task.done() and not task.cancelled() else ErrorCode.request_timed_out


async def _denied() -> ErrorCode:
    return ErrorCode.cluster_authorization_failed


async def _write(partitions: Partitions, clock: Clock, topic: str, index: int, marker: _Marker) -> ErrorCode:
    """Append one marker to one partition; return when the quorum has it."""
    log = partitions.find_by_name(topic.encode(), index)
    if log is None or log.is_releasing:
        return why_not_here(partitions, topic, index)
    verdict = log.core.judge_marker(
        marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, raises_epoch=marker.raises_epoch
    )
    if verdict is not MarkerVerdict.APPEND:
        return _REFUSALS[verdict]
    batch = build_marker(marker.kind, marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, clock.wall_ms())
    try:
        await append_now(log, batch)
    except StratalogError as failure:
        return produce_error_code_of(failure)
    return ErrorCode.none


def _response(context: RequestContext, request: Any, codes: dict[tuple[int, int, int], ErrorCode]) -> Any:
    markers = []
    for marker in request.markers:
        topics = []
        for topic in marker.topics:
            results = tuple(
                context.new(
                    "WritableTxnMarkerPartitionResult",
                    partition_index=index,
                    error_code=codes[id(marker), id(topic), index],
                )
                for index in topic.partition_indexes
            )
            topics.append(context.new("WritableTxnMarkerTopicResult", name=topic.name, partitions=results))
        markers.append(context.new("WritableTxnMarkerResult", producer_id=marker.producer_id, topics=tuple(topics)))
    return context.new("WriteTxnMarkersResponse", markers=tuple(markers))


API: Final = HandlerInfo(key=27, min_version=1, max_version=2, handle=handle, access=_ACCESS)
