"""DescribeLogDirs, versions 1–5 (KIP-113, KIP-827): the bytes of the partitions that this broker owns, hot and cold.

Differences from Apache Kafka: brokers hold no data, so there is one directory for each tier: ``hot`` for the bookies, without
the factor of their copies, and ``cold`` for the object store. A partition is listed by its owner alone, in both directories.
The offset lag is 0, and the space of the bookies and of the store is unknown (-1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.log_sizes import sizes_of_owned
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import encode_response
from stratalog_broker.protocol.log_dirs import FLEXIBLE_VERSION, encode_dir
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.CLUSTER)
HOT_DIR: Final = "hot"
COLD_DIR: Final = "cold"


async def handle(
    context: RequestContext, request: Any, *, view: MetadataView, partitions: Partitions, permissions: Permissions
) -> Any:
    if not permissions.allows_cluster(context, _ACCESS.operation):
        return context.new("DescribeLogDirsResponse", error_code=ErrorCode.cluster_authorization_failed, results=())
    sizes = await sizes_of_owned(view, partitions, _wanted(request))
    hot = {name: [(one.partition, one.hot_bytes) for one in rows] for name, rows in sizes.items()}
    cold = {name: [(one.partition, one.cold_bytes) for one in rows] for name, rows in sizes.items()}
    version, new = context.api_version, context.reply
    dirs = [encode_dir(new, version, HOT_DIR, hot), encode_dir(new, version, COLD_DIR, cold)]
    is_flexible = version >= FLEXIBLE_VERSION
    head = encode_response(context.new("DescribeLogDirsResponse", error_code=ErrorCode.none, results=()))
    return with_array(head, int(is_flexible), len(dirs), dirs, is_flexible=is_flexible)


def _wanted(request: Any) -> Mapping[str, Collection[int]] | None:
    """Return the partitions that are asked for by topic; None: all."""
    if request.topics is None:
        return None
    wanted: defaultdict[str, set[int]] = defaultdict(set)
    for topic in request.topics:
        wanted[topic.topic] |= set(topic.partitions)
    return wanted


API: Final = HandlerInfo(key=35, min_version=1, max_version=5, handle=handle, access=_ACCESS)
