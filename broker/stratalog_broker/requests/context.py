"""What a handler gets besides its request: who asks, in which version, and the broker's services."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stratalog_broker.configs.topic_configs import TopicConfigs
from stratalog_broker.protocol.entities import ResponseFactory, response_factory
from stratalog_core.ports import Buffer, Clock, Random
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic

if TYPE_CHECKING:
    from stratalog_bookies.client import LedgerClient
    from stratalog_broker.cluster.advertised_brokers import NamedBrokers
    from stratalog_broker.cluster.partition_rows import PartitionRows
    from stratalog_broker.cluster.producer_ids import ProducerIds
    from stratalog_broker.configs.memory import MemoryShares
    from stratalog_broker.configs.settings import BrokerSettings
    from stratalog_broker.coordination.groups.service import GroupService
    from stratalog_broker.network.server import ConnectionRegistry
    from stratalog_broker.partitions.ownership import Partitions
    from stratalog_broker.reads.fetch_sessions import FetchSessions
    from stratalog_broker.reads.log_reader import LogReader
    from stratalog_broker.reads.pending_reads import PendingReads
    from stratalog_broker.requests.deadlines import Deadlines
    from stratalog_tiering.cold.reader import ColdReader

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class BrokerServices:
    """The parts of one broker, put together once by ``server.py``; handlers only read it.

    ``groups`` is set after construction because the group coordinators append through ``partitions``.
    """

    settings: BrokerSettings
    memory: MemoryShares
    metadata: MetadataClient
    ledgers: LedgerClient
    cold: ColdReader
    searches: SearchPool
    clock: Clock
    random: Random
    deadlines: Deadlines = field(init=False)
    partitions: Partitions = field(init=False)
    partition_rows: PartitionRows = field(init=False)
    named_brokers: NamedBrokers = field(init=False)
    reader: LogReader = field(init=False)
    pending_reads: PendingReads = field(init=False)
    fetch_sessions: FetchSessions = field(init=False)
    producer_ids: ProducerIds = field(init=False)
    groups: GroupService = field(init=False)
    connections: ConnectionRegistry = field(init=False)
    is_stopping: bool = False
    """Nobody should begin to wait any more."""

    @property
    def view(self) -> MetadataView:
        return self.metadata.view

    def configs_of(self, topic: Topic) -> TopicConfigs:
        """Configs in force for a topic: its own, the cluster's defaults, the built-in ones."""
        return TopicConfigs.of(topic, topic_defaults(self.view))

    def response_room(self) -> int:
        """Bytes that a response may have beside those that clients have not taken; at least one, for a fetch's first batch."""
        return max(self.memory.responses - self.connections.responses.bytes_held, 1)


class Connection(Protocol):
    """What a request needs of the connection that it came by."""

    @property
    def client_host(self) -> str: ...

    @property
    def listener(self) -> str: ...

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        """Send a whole response (length and header included) when its turn comes; nothing for acks=0."""
        ...

    def released(self, request_bytes: int) -> None:
        """So many bytes of a request are no longer held."""
        ...

    def close(self, reason: str) -> None: ...


class RequestContext:
    """One request. ``new`` builds the structs of its response in its version (see :class:`ResponseFactory`).

    Its bytes count against the bounds of connection and broker until it is answered and ``release`` has been called as often
    as ``hold``.
    """

    __slots__ = (
        "_connection",
        "_holds",
        "api_key",
        "api_version",
        "arrived_at_s",
        "client_id",
        "correlation_id",
        "request_bytes",
        "response",
        "services",
    )

    def __init__(
        self,
        services: BrokerServices,
        connection: Connection,
        *,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str,
        request_bytes: int,
        arrived_at_s: float = 0.0,
    ) -> None:
        self.services = services
        self.arrived_at_s = arrived_at_s
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.request_bytes = request_bytes
        self.response: Sequence[Buffer] | None = None
        """Set once it is answered, until its turn to be sent comes."""
        self._connection = connection
        self._holds = 1

    @property
    def client_host(self) -> str:
        """Address of the client, without port."""
        return self._connection.client_host

    @property
    def listener(self) -> str:
        """Name of the listener by which the request came; brokers are named by their addresses for it."""
        return self._connection.listener

    def new(self, kind: str, /, **values: Any) -> Any:
        """``context.new("MetadataResponse", brokers=…)``: a response struct; fields unknown to the version are dropped."""
        return response_factory(self.api_key, self.api_version)(kind, **values)

    @property
    def reply(self) -> ResponseFactory:
        return response_factory(self.api_key, self.api_version)

    def respond(self, parts: Sequence[Buffer]) -> None:
        """For handlers of raw requests: the whole response, length and header included (empty: none is due). Once."""
        assert self.response is None, "a request is answered once"
        self.response = parts
        self._connection.respond(self, parts)
        self.release()

    def hold(self) -> None:
        """The request's bytes are held by somebody more."""
        self._holds += 1

    def release(self) -> None:
        """One holder less."""
        self._holds -= 1
        if self._holds == 0:
            self._connection.released(self.request_bytes)

    def fail(self) -> None:
        """The request met a defect of ours; to be called while that is handled: logs it and drops the client."""
        _log.exception("API %d version %d failed", self.api_key, self.api_version)
        self.close_connection("a request could not be handled")
        self.release()

    def close_connection(self, reason: str) -> None:
        """Drop the client."""
        self._connection.close(reason)
