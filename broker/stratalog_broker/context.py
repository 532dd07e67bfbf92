"""What a handler gets besides its request: who asks, in which version, and the broker's services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stratalog_broker.protocol.entities import ResponseFactory, response_factory
from stratalog_core.ports import Buffer, Clock, Random
from stratalog_metadata.api import MetadataClient, MetadataView

if TYPE_CHECKING:
    from stratalog_tiering.reader import ColdReader

    from stratalog_bookies.client import LedgerClient
    from stratalog_broker.config import BrokerSettings
    from stratalog_broker.groups.service import GroupService
    from stratalog_broker.partitions import Partitions


@dataclass(slots=True, kw_only=True)
class BrokerServices:
    """The parts of one broker, put together once by ``server.py``; handlers only read it.

    ``groups`` is set after construction because the group coordinators append through ``partitions``.
    """

    settings: BrokerSettings
    metadata: MetadataClient
    ledgers: LedgerClient
    cold: ColdReader
    clock: Clock
    random: Random
    partitions: Partitions = field(init=False)
    groups: GroupService = field(init=False)

    @property
    def view(self) -> MetadataView:
        return self.metadata.view


Respond = Callable[[Sequence[Buffer]], None]


class RequestContext:
    """One request. ``new`` builds the structs of its response in its version (see :class:`ResponseFactory`)."""

    __slots__ = ("api_key", "api_version", "client_host", "client_id", "connection_id", "correlation_id", "respond", "services")

    def __init__(
        self,
        *,
        services: BrokerServices,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str,
        client_host: str,
        connection_id: int,
        respond: Respond,
    ) -> None:
        self.services = services
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.connection_id = connection_id
        self.respond = respond
        """For handlers of raw requests: send a whole response (length and header included), exactly once."""

    @property
    def reply(self) -> ResponseFactory:
        return response_factory(self.api_key, self.api_version)

    def new(self, kind: str, /, **values: Any) -> Any:
        """``context.new("MetadataResponse", brokers=…)``: a response struct; fields unknown to the version are dropped."""
        return response_factory(self.api_key, self.api_version)(kind, **values)
