"""Asks the authorizer for each resource that a request names. Handlers answer the denied ones with Kafka's codes, one by one.

Without an authorizer everything is allowed and names are not even looked at: one attribute read for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_commands import ResourceKind
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import OPERATIONS_OF, Access, Authorizer, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.principal import Principal
from stratalog_metadata.records import Topic

CLUSTER_NAME: Final = "kafka-cluster"
"""Kafka's name for the cluster as a resource."""
OPERATIONS_UNKNOWN: Final = -(2**31)
"""The bit field of a response whose request does not ask for authorized operations."""
DESCRIBE_TOPIC: Final = Access(Operation.DESCRIBE, Resource.TOPIC)
READ_TOPIC: Final = Access(Operation.READ, Resource.TOPIC)
WRITE_TOPIC: Final = Access(Operation.WRITE, Resource.TOPIC)
CREATE_TOPIC: Final = Access(Operation.CREATE, Resource.TOPIC)
FindPartition = Callable[[bytes, int], PartitionLog | None]
"""Finds a partition of this broker by topic key and index."""
_NONE: Final[frozenset[str]] = frozenset()


class Permissions:
    """Tells handlers which topics and groups a client may access. There is one instance per broker."""

    def __init__(self, authorizer: Authorizer | None) -> None:
        self._authorizer = authorizer
        self.is_open: Final = authorizer is None
        """Whether everybody may do everything."""

    def denied(self, context: RequestContext, access: Access, names: Iterable[str]) -> frozenset[str]:
        """Return those of ``names`` that the client may not access. Each different name is asked for once."""
        authorizer = self._authorizer
        if authorizer is None:
            return _NONE
        principal = _principal_of(context)
        return frozenset(name for name in set(names) if not authorizer.allows(principal, access, name))

    def allows(self, context: RequestContext, access: Access, name: str) -> bool:
        """Return whether the client may access the resource with that name."""
        return self._authorizer is None or self._authorizer.allows(_principal_of(context), access, name)

    def allows_cluster(self, context: RequestContext, operation: Operation) -> bool:
        """Return whether the client may perform the operation on the cluster."""
        return self._authorizer is None or self.allows(context, Access(operation, Resource.CLUSTER), CLUSTER_NAME)

    def operations(self, context: RequestContext, resource: Resource, name: str, *, wanted: bool = True) -> int:
        """Return the operations that the client may perform as Kafka's bit field; unless ``wanted``, that they are unknown."""
        if not wanted:
            return OPERATIONS_UNKNOWN
        allowed = OPERATIONS_OF[resource]
        if self._authorizer is not None:
            allowed = tuple(each for each in allowed if self.allows(context, Access(each, resource), name))
        return sum(1 << operation for operation in allowed)

    def allows_some(self, context: RequestContext, access: Access) -> bool:
        """Return whether the client may access at least one resource of the kind, whatever its name."""
        return self._authorizer is None or self._authorizer.allows_some(_principal_of(context), access)

    def denied_keys(
        self,
        context: RequestContext,
        access: Access,
        keys: Iterable[bytes],
        topic_by_id: Callable[[bytes], Topic | None] | None,
    ) -> frozenset[bytes]:
        """Return the keys of topics that the client may not access, for Produce and Fetch.

        Keys are names in UTF-8, or ids if ``topic_by_id`` is given; unknown ids are not denied. Call it unless ``is_open``.
        """
        names: dict[bytes, str] = {}
        for key in set(keys):
            topic = topic_by_id(key) if topic_by_id is not None else None
            if topic is not None or topic_by_id is None:
                names[key] = topic.name if topic is not None else key.decode(errors="replace")
        denied = self.denied(context, access, names.values())
        return frozenset(key for key, name in names.items() if name in denied)

    def config_denial(
        self, context: RequestContext, operation: Operation, kind: int, name: str
    ) -> tuple[ErrorCode, str] | None:
        """Return the code and message for a config resource that the client may not access; None if it may.

        Topics and groups are resources of their own, brokers and client metrics belong to the cluster. The command refuses
        other kinds.
        """
        if kind == ResourceKind.TOPIC:
            access = Access(operation, Resource.TOPIC)
            if not self.allows(context, access, name):
                return ErrorCode.topic_authorization_failed, denial(context, access, name)
        elif kind == ResourceKind.GROUP:
            access = Access(operation, Resource.GROUP)
            if not self.allows(context, access, name):
                return ErrorCode.group_authorization_failed, denial(context, access, name)
        elif kind in (ResourceKind.BROKER, ResourceKind.CLIENT_METRICS) and not self.allows_cluster(context, operation):
            access = Access(operation, Resource.CLUSTER)
            return ErrorCode.cluster_authorization_failed, denial(context, access, CLUSTER_NAME)
        return None

    def check_group(self, context: RequestContext, access: Access, group_id: str) -> None:
        """Raise ``KafkaError`` with GROUP_AUTHORIZATION_FAILED unless the client may access the group."""
        if self._authorizer is not None and not self.allows(context, access, group_id):
            raise KafkaError(ErrorCode.group_authorization_failed, denial(context, access, group_id))

    def check_transactional_id(self, context: RequestContext, access: Access, transactional_id: str) -> None:
        """Raise ``KafkaError`` with TRANSACTIONAL_ID_AUTHORIZATION_FAILED unless the client may access the id."""
        if self._authorizer is not None and not self.allows(context, access, transactional_id):
            denied = denial(context, access, transactional_id)
            raise KafkaError(ErrorCode.transactional_id_authorization_failed, denied)


def except_denied(find: FindPartition, denied: frozenset[bytes]) -> FindPartition:
    """Return ``find`` without the topics whose keys are in ``denied``: the other lookups cost nothing more."""
    if not denied:
        return find
    return lambda key, index: None if key in denied else find(key, index)


def denial(context: RequestContext, access: Access, name: str) -> str:
    """Return the message for a denied resource."""
    return f"{context.principal} may not {access.operation.name} {access.resource.name} {name}"


def _principal_of(context: RequestContext) -> Principal:
    principal = context.principal
    assert principal is not None, "admission refuses clients that have not authenticated"
    return principal
