"""The requests that a group of the consumer protocol handles in its turns: heartbeats, and those of its classic members."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRequest
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    SyncAnswer,
    SyncRequest,
)

GroupRequest = HeartbeatRequest | JoinRequest | SyncRequest | LeaveRequest


def refusal(request: GroupRequest, error: ErrorCode, message: str | None = None) -> Answer:
    """Return the answer to a request that changes nothing. Only heartbeats have a message."""
    value: HeartbeatAnswer | JoinAnswer | SyncAnswer | LeaveAnswer
    match request:
        case HeartbeatRequest():
            value = HeartbeatAnswer(error=error, message=message)
        case JoinRequest():
            given_id = request.fresh_member_id if error is ErrorCode.member_id_required else request.member_id
            value = JoinAnswer(error=error, member_id=given_id)
        case SyncRequest():
            value = SyncAnswer(error=error)
        case LeaveRequest():
            value = LeaveAnswer(error=error)
    return Answer(ticket=request.ticket, value=value)
