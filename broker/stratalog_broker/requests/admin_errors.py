"""Kafka's codes for the errors of ``admin/``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin import errors
from stratalog_broker.protocol.errors import error_code_of
from stratalog_core.errors import StratalogError

_CODES: Final[Mapping[type[StratalogError], ErrorCode]] = {
    errors.InvalidTopic: ErrorCode.invalid_topic_exception,
    errors.TopicExists: ErrorCode.topic_already_exists,
    errors.InvalidPartitions: ErrorCode.invalid_partitions,
    errors.InvalidReplicationFactor: ErrorCode.invalid_replication_factor,
    errors.InvalidAssignment: ErrorCode.invalid_replica_assignment,
    errors.InvalidConfig: ErrorCode.invalid_config,
    errors.InvalidFeatureLevel: ErrorCode.invalid_update_version,
    errors.NoReassignment: ErrorCode.no_reassignment_in_progress,
    errors.ElectionNotNeeded: ErrorCode.election_not_needed,
    errors.PreferredLeaderUnavailable: ErrorCode.preferred_leader_not_available,
    errors.NoEligibleLeader: ErrorCode.eligible_leaders_not_available,
    errors.BrokerNotRegistered: ErrorCode.broker_id_not_registered,
    errors.LimitExceeded: ErrorCode.policy_violation,
    errors.Protected: ErrorCode.policy_violation,
    errors.ObjectsLocked: ErrorCode.policy_violation,
    errors.OnlyCompacted: ErrorCode.policy_violation,
    errors.OffsetOutOfRange: ErrorCode.offset_out_of_range,
}


def admin_error_code_of(failure: StratalogError) -> ErrorCode:
    """Return the code for a refusal or failure of an administrative command."""
    return _CODES.get(type(failure)) or error_code_of(failure)


async def outcome_of(command: Awaitable[Any]) -> tuple[ErrorCode, str | None]:
    """Await an administrative command; return the code and message of its row in the response."""
    try:
        await command
    except StratalogError as failure:
        return admin_error_code_of(failure), failure.message
    return ErrorCode.none, None
