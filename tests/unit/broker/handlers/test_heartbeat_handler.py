"""The response to a heartbeat while the coordinator is loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.handlers import heartbeat
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.context import Connection, RequestContext
from stratalog_broker.requests.permissions import Permissions


class _RefusingGroups:
    def __init__(self, code: ErrorCode) -> None:
        self._code = code

    def coordinator_of(self, group_id: str) -> Any:
        raise KafkaError(self._code)


@pytest.mark.parametrize(
    ("refusal", "answer"),
    [
        # Kafka's coordinator answers blindly with success while it loads; aiokafka dies of any error it does not know here.
        (ErrorCode.coordinator_load_in_progress, ErrorCode.none),
        (ErrorCode.not_coordinator, ErrorCode.not_coordinator),
    ],
)
async def test_a_loading_coordinator_answers_heartbeats_with_success(refusal: ErrorCode, answer: ErrorCode) -> None:
    groups = cast(GroupService, _RefusingGroups(refusal))
    context = RequestContext(cast(Connection, None), api_key=12, api_version=4, correlation_id=1, client_id="", request_bytes=0)
    request = SimpleNamespace(group_id="g", member_id="m", group_instance_id=None, generation_id=1)
    answered = await heartbeat.handle(context, request, groups=groups, permissions=Permissions(None))
    assert answered.error_code is answer
