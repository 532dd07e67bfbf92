"""Authentication, authorization and quotas: the ports of request admission, and ``OPEN``, which admits everything.

Security and quotas are added by implementing these ports. Codes are Kafka's (AclOperation, ResourceType).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.principal import Principal


class Operation(IntEnum):
    """The operation that a request performs on its resources."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class Resource(IntEnum):
    """The kind of resource that a request accesses."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


OPERATIONS_OF: Final[Mapping[Resource, tuple[Operation, ...]]] = {
    Resource.TOPIC: (
        Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE, Operation.ALTER, Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
    ),
    Resource.GROUP: (
        Operation.READ, Operation.DELETE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
    ),
    Resource.CLUSTER: (
        Operation.CREATE, Operation.ALTER, Operation.DESCRIBE, Operation.CLUSTER_ACTION, Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS, Operation.IDEMPOTENT_WRITE,
    ),
}  # fmt: skip
"""The operations that exist for each kind of resource (Kafka's ``AclEntry``)."""


class Access(NamedTuple):
    """An operation on a kind of resource."""

    operation: Operation
    resource: Resource

    @property
    def changes_log(self) -> bool:
        """Whether the operation changes topics, records or the cluster. Positions of groups are neither."""
        is_read = self.operation in (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
        return not is_read and self.resource is not Resource.GROUP


class Authenticator(Protocol):
    """Determines the principal of a new connection."""

    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        """Return the principal of a client of ``listener``; None if it has to authenticate first."""
        ...


class Authorizer(Protocol):
    """Decides which operations a principal may perform on which resources. ``Permissions`` asks it; it must not block."""

    def allows(self, principal: Principal, access: Access, name: str) -> bool:
        """Return whether ``principal`` may perform the operation on the topic, group or cluster called ``name``."""
        ...

    def allows_some(self, principal: Principal, access: Access) -> bool:
        """Return whether ``principal`` may perform the operation on at least one resource of that kind."""
        ...


class Quotas(Protocol):
    """Bounds the request rate of clients."""

    def throttle_ms(self, context: RequestContext) -> int:
        """Return for how long to stop reading the request's connection; 0 if its client is within its quota."""
        ...


class AccessRules(NamedTuple):
    """The ports in force. A step whose port is None is skipped: everything is allowed and no client is throttled."""

    authenticator: Authenticator | None = None
    """None: every client is ``ANONYMOUS``."""
    authorizer: Authorizer | None = None
    """None: everybody may do everything, and no name is asked for."""
    quotas: Quotas | None = None


OPEN: Final = AccessRules()
"""Allows every client every request, without quotas."""
