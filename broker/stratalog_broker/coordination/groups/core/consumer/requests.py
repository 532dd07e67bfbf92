"""ConsumerGroupHeartbeat: request, answer, and the checks that need no group (KIP-848).

Joining, leaving and reporting owned partitions are all heartbeats, distinguished by the member epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.model import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEAVE_STATIC_EPOCH,
    Partitions,
    Topics,
)
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_core.errors import Invalid

MayDescribe = Callable[[frozenset[str]], frozenset[str]]
"""Returns those of some topics' names that a client may describe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    """None means "as before" everywhere; ``rebalance_timeout_ms`` is -1 for that."""

    ticket: int
    member_id: str
    member_epoch: int
    client_id: str = ""
    client_host: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    topic_pattern: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    may_describe: MayDescribe | None = None
    """None if the sender may describe every topic."""

    @property
    def subscription_bytes(self) -> int:
        return sum(map(len, self.topic_names or ())) + len(self.topic_pattern or "")

    @property
    def is_joining(self) -> bool:
        return self.member_epoch == JOIN_EPOCH

    @property
    def is_leaving(self) -> bool:
        return self.member_epoch in (LEAVE_EPOCH, LEAVE_STATIC_EPOCH)

    @property
    def is_full(self) -> bool:
        """Whether the member sent everything, as it does after an error; it then needs its assignment."""
        has_subscription = self.topic_names is not None or self.topic_pattern is not None
        return self.rebalance_timeout_ms != -1 and has_subscription and self.owned is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """``assignment`` is None if it did not change."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Partitions | None = None


class HeartbeatRefused(Exception):
    """A heartbeat is answered with an error and changes nothing."""

    def __init__(self, error: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.answer = HeartbeatAnswer(error=error, message=message)


def check_heartbeat(request: HeartbeatRequest, limits: ConsumerLimits, topics: Topics, *, needs_member_id: bool) -> None:
    """Raise ``HeartbeatRefused`` for a request that is wrong whatever the group. Since v1 members choose their ids."""
    wrong = next(_wrong_fields(request, limits, needs_member_id=needs_member_id), None)
    if wrong is not None:
        raise HeartbeatRefused(ErrorCode.invalid_request, wrong)
    if request.assignor is not None and request.assignor not in limits.assignors:
        known = ", ".join(limits.assignors)
        raise HeartbeatRefused(ErrorCode.unsupported_assignor, f"assignor {request.assignor} is not supported; choose {known}")
    if request.topic_pattern:
        try:
            topics.matching(request.topic_pattern)
        except Invalid as refused:
            raise HeartbeatRefused(ErrorCode.invalid_regular_expression, refused.message) from refused


def _wrong_fields(request: HeartbeatRequest, limits: ConsumerLimits, *, needs_member_id: bool) -> Iterator[str]:
    if not request.member_id.strip() and (needs_member_id or request.member_epoch > 0 or request.member_epoch == LEAVE_EPOCH):
        yield "MemberId can't be empty."
    if request.instance_id is not None and not request.instance_id.strip():
        yield "InstanceId can't be empty."
    if request.rack_id is not None and not request.rack_id.strip():
        yield "RackId can't be empty."
    if request.is_joining:
        yield from _wrong_fields_of_join(request)
    elif request.member_epoch == LEAVE_STATIC_EPOCH and request.instance_id is None:
        yield "InstanceId can't be null."
    elif request.member_epoch < LEAVE_STATIC_EPOCH:
        yield f"MemberEpoch is {request.member_epoch}; minimum is {LEAVE_STATIC_EPOCH}."
    texts = (request.member_id, request.instance_id, request.rack_id, request.client_id, request.topic_pattern)
    if any(len(text.encode()) > limits.name_bytes_max for text in texts if text):
        yield f"A text is longer than {limits.name_bytes_max} bytes."
    if request.subscription_bytes > limits.subscription_bytes_max:
        yield f"The names of the subscribed topics have more than {limits.subscription_bytes_max} characters."


def _wrong_fields_of_join(request: HeartbeatRequest) -> Iterator[str]:
    if request.rebalance_timeout_ms == -1:
        yield "RebalanceTimeoutMs must be provided in first request."
    if request.owned is None or request.owned:
        yield "TopicPartitions must be empty when (re-)joining."
    if request.topic_names is None and request.topic_pattern is None:
        yield "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
