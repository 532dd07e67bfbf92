"""Metadata (key 3), versions 0–13: brokers, topics, partitions and their owners, from this broker's view.

Replicas are derived (``replicas.py``), because copies are on bookies and ownership moves without copying. A topic that is
requested by name and does not exist is created if the client (since v4) and the broker's settings allow it, and returned as
soon as it has owners. Topics that the client may not describe are left out, or answered TOPIC_AUTHORIZATION_FAILED if they
are named. A topic that is named several times is described once, as in Kafka.

A response is made in pieces, and the event loop runs between them (``cluster/partition_rows.py``): topics may change meanwhile,
but each is described as it was at one time. One response with all topics is made at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.errors import InvalidTopic, NotServedYet, TopicExists
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.admin.topics import NewTopic, TopicCommands
from stratalog_broker.cluster.advertised_brokers import AdvertisedBrokers
from stratalog_broker.cluster.partition_rows import TOPIC_ROWS, PartitionRows, Pieces
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.metadata import encode_metadata, encode_topic
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.encoded_array import EncodedArray
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, CREATE_TOPIC, Permissions
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import CLUSTER_KEY, Broker, Cluster, Topic, topic_key

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TOPIC)
_KEY: Final = 3
_CREATE_TIMEOUT_S: Final = 5.0
_CREATES_MAX: Final = 100


class MetadataHandler:
    """Handles all Metadata requests of the broker."""

    def __init__(
        self,
        *,
        settings: BrokerSettings,
        view: MetadataView,
        partitions: Partitions,
        advertised_brokers: AdvertisedBrokers,
        partition_rows: PartitionRows,
        topic_commands: TopicCommands,
        permissions: Permissions,
    ) -> None:
        self._creates_topics = settings.auto_create_topics
        self._view = view
        self._partitions = partitions
        self._brokers = advertised_brokers
        self._rows = partition_rows
        self._topic_commands = topic_commands
        self._permissions = permissions
        self._describing_all = asyncio.Lock()

    async def __call__(self, context: RequestContext, request: Any) -> bytes:
        """Return the response from the view, after creating missing topics."""
        if _wants_all(context, request):
            async with self._describing_all:
                topics = await self._all_topics(context, request)
        else:
            topics = await self._named_topics(context, request)
        live = self._brokers.live()
        cluster = self._view.find(Cluster, CLUSTER_KEY)
        response = context.new(
            "MetadataResponse",
            brokers=tuple(_broker(context, broker) for broker in self._brokers.with_recently_dead(live)),
            cluster_id=cluster.cluster_id if cluster is not None else None,
            controller_id=live[0].broker_id if live else -1,
            topics=(),
            error_code=ErrorCode.none,
            cluster_authorized_operations=self._permissions.operations(
                context, Resource.CLUSTER, CLUSTER_NAME, wanted=getattr(request, "include_cluster_authorized_operations", False)
            ),
        )
        return encode_metadata(response, context.api_version, topics.count, topics.join())

    async def _all_topics(self, context: RequestContext, request: Any) -> EncodedArray:
        names = [topic.name for topic in self._view.all(Topic)]
        denied = self._permissions.denied(context, _ACCESS, names)
        topics = EncodedArray(TOPIC_ROWS)
        for name in names:
            topic = self._view.find(Topic, topic_key(name))
            if topic is not None and name not in denied:
                await topics.add(await self._describe(context, request, topic, topics.pieces))
        return topics

    async def _named_topics(self, context: RequestContext, request: Any) -> EncodedArray:
        may_create = getattr(request, "allow_auto_topic_creation", True) and self._creates_topics
        denied = self._permissions.denied(context, _ACCESS, (str(one.name) for one in request.topics if one.name is not None))
        missing = {
            str(wanted.name)
            for wanted in request.topics
            if wanted.name is not None and wanted.name not in denied and self._view.get(topic_key(wanted.name)) is None
        }
        codes = await self._create_allowed(context, missing) if may_create and missing else {}
        topics = EncodedArray(TOPIC_ROWS)
        for wanted in {(one.name, getattr(one, "topic_id", None)): one for one in request.topics}.values():
            await topics.add(await self._answer(context, request, wanted, denied, codes, topics.pieces))
        return topics

    async def _create_allowed(self, context: RequestContext, missing: set[str]) -> dict[str, ErrorCode]:
        """Create the topics that the client may create; return the error codes of all by name."""
        denied: frozenset[str] = frozenset()
        if not self._permissions.allows_cluster(context, Operation.CREATE):
            denied = self._permissions.denied(context, CREATE_TOPIC, missing)
        codes = await self._create(sorted(missing - denied)[:_CREATES_MAX])
        return {**codes, **dict.fromkeys(denied, ErrorCode.topic_authorization_failed)}

    async def _create(self, names: Sequence[str]) -> dict[str, ErrorCode]:
        """Create topics with the broker's defaults; return the error codes by name."""

        async def create(name: str) -> ErrorCode:
            try:
                await self._topic_commands.create(NewTopic(name=name), _CREATE_TIMEOUT_S)
            except (TopicExists, NotServedYet):
                return ErrorCode.leader_not_available
            except StratalogError as failure:
                return admin_error_code_of(failure)
            return ErrorCode.none

        return dict(zip(names, await asyncio.gather(*map(create, names)), strict=True))

    async def _answer(
        self, context: RequestContext, request: Any, wanted: Any, denied: frozenset[str], codes: dict[str, ErrorCode],
        pieces: Pieces,
    ) -> bytes:  # fmt: skip
        topic_id: UUID | None = getattr(wanted, "topic_id", None)
        if wanted.name is None and topic_id is not None:
            topic = self._partitions.topic_by_id(topic_id.bytes)
            if topic is not None and not self._permissions.allows(context, _ACCESS, topic.name):
                return _refuse(context, None, topic_id, ErrorCode.topic_authorization_failed)
            if topic is not None:
                return await self._describe(context, request, topic, pieces)
            return _refuse(context, None, topic_id, ErrorCode.unknown_topic_id)
        name = str(wanted.name or "")
        if name in denied:
            return _refuse(context, name, None, ErrorCode.topic_authorization_failed)
        topic = self._view.find(Topic, topic_key(name))
        if topic is not None:
            return await self._describe(context, request, topic, pieces)
        try:
            check_topic_name(name)
        except InvalidTopic as refused:
            return _refuse(context, name, None, admin_error_code_of(refused))
        code = codes.get(name, ErrorCode.none)
        return _refuse(context, name, None, ErrorCode.unknown_topic_or_partition if code is ErrorCode.none else code)

    async def _describe(self, context: RequestContext, request: Any, topic: Topic, pieces: Pieces) -> bytes:
        described = context.new(
            "MetadataResponseTopic",
            error_code=ErrorCode.none,
            name=topic.name,
            topic_id=topic.topic_id,
            is_internal=topic.internal,
            partitions=(),
            topic_authorized_operations=self._permissions.operations(
                context, Resource.TOPIC, topic.name, wanted=getattr(request, "include_topic_authorized_operations", False)
            ),
        )
        rows = await self._rows.of(topic, context.api_version, pieces)
        return encode_topic(described, context.api_version, rows.partitions, rows.blocks)


def _broker(context: RequestContext, broker: Broker) -> Any:
    host, port = broker.address_for(context.listener)
    return context.new("MetadataResponseBroker", node_id=broker.broker_id, host=host, port=port, rack=broker.rack or None)


def _wants_all(context: RequestContext, request: Any) -> bool:
    return request.topics is None or (context.api_version == 0 and not request.topics)


def _refuse(context: RequestContext, name: str | None, topic_id: UUID | None, code: ErrorCode) -> bytes:
    if name is None and not _name_may_be_null(context):
        name = ""
    refused = context.new(
        "MetadataResponseTopic", error_code=code, name=name, topic_id=topic_id, is_internal=False, partitions=()
    )  # fmt: skip
    return encode_topic(refused, context.api_version, 0, ())


def _name_may_be_null(context: RequestContext) -> bool:
    return context.api_version >= 12


API: Final = HandlerInfo(key=_KEY, min_version=0, max_version=13, handle=MetadataHandler, access=_ACCESS)
