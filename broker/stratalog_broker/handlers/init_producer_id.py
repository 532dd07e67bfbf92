"""InitProducerId (key 22), versions 0–5: ids for idempotent producers (KIP-98, KIP-360).

Every call without a transactional id gets a new id with epoch 0, as in Kafka, even a call that asks to raise the epoch of an
existing id. Transactions are not served yet: a transactional id is refused with TRANSACTIONAL_ID_AUTHORIZATION_FAILED, which
every client reports as fatal. A client that may write any topic gets an id (KIP-679).
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.producer_ids import ProducerIds
from stratalog_broker.protocol.errors import error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import WRITE_TOPIC, Permissions
from stratalog_core.errors import Retriable, StratalogError

_KEY: Final = 22


async def handle(context: RequestContext, request: Any, *, producer_ids: ProducerIds, permissions: Permissions) -> Any:
    """Return the next producer id."""
    if request.transactional_id is not None:
        return _refused(context, ErrorCode.transactional_id_authorization_failed)
    may_write = permissions.allows_cluster(context, Operation.IDEMPOTENT_WRITE) or permissions.allows_some(context, WRITE_TOPIC)
    if not may_write:
        return _refused(context, ErrorCode.cluster_authorization_failed)
    try:
        producer_id = await producer_ids.take()
    except StratalogError as failure:
        # Every client retries on COORDINATOR_NOT_AVAILABLE.
        retry = isinstance(failure, Retriable)
        return _refused(context, ErrorCode.coordinator_not_available if retry else error_code_of(failure))
    return context.new("InitProducerIdResponse", error_code=ErrorCode.none, producer_id=producer_id, producer_epoch=0)


def _refused(context: RequestContext, code: ErrorCode) -> Any:
    return context.new("InitProducerIdResponse", error_code=code, producer_id=-1, producer_epoch=-1)


API: Final = HandlerInfo(
    key=_KEY, min_version=0, max_version=5, handle=handle, access=Access(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)
)
