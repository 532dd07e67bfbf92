"""Who a client is, what it may do, and how much: the ports of request admission, and implementations that admit everything.

Security and quotas enter by other implementations of these ports. Codes are Kafka's (AclOperation, ResourceType).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.principal import Principal


class Operation(IntEnum):
    """What a request does to its resources."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class Resource(IntEnum):
    """The kind of resource that a request is about."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4


class Access(NamedTuple):
    """The permission that an API needs."""

    operation: Operation
    resource: Resource


class Authenticator(Protocol):
    """Knows the principal of a new connection."""

    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        """The principal of a client of ``listener``; None if it has to authenticate first."""
        ...


class Authorizer(Protocol):
    """Decides what principals may do."""

    def allows(self, context: RequestContext, access: Access) -> bool:
        """Whether the principal of the request may do that to any resource of the kind."""
        ...


class Quotas(Protocol):
    """Bounds how often clients may ask."""

    def throttle_ms(self, context: RequestContext) -> int:
        """How long the connection of this request is not read after it; 0 if its client is within its quota."""
        ...


class AccessRules(NamedTuple):
    """The ports in force. None stands for a step that does nothing and costs nothing: all is allowed, nobody is throttled."""

    authenticator: Authenticator | None = None
    """None: every client is ``ANONYMOUS``."""
    authorizer: Authorizer | None = None
    quotas: Quotas | None = None


OPEN: Final = AccessRules()
"""Everybody may do everything, as often as they like."""
