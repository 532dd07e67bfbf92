"""Admission: requests before authentication, requests that authorization refuses, and throttled clients."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from unit.broker.mini_cluster import run_cluster
from unit.broker.wire_client import CLIENT_ID, connect

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.network.connection import ClientConnection
from stratalog_broker.requests.access import Access, AccessRules, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.principal import ANONYMOUS, Principal

API_VERSIONS, LIST_GROUPS, DESCRIBE_CLUSTER = 18, 16, 60


class NobodyYet:
    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        return None


class AliceOnLoopback:
    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        return Principal("User", "alice") if (listener, client_host) == ("", "127.0.0.1") else ANONYMOUS


class OnlyGroupsForAlice:
    def allows(self, context: RequestContext, access: Access) -> bool:
        return str(context.principal) == "User:alice" and access.resource is Resource.GROUP


class SlowWireClients:
    """Throttles the client ``CLIENT_ID`` after ListGroups."""

    def __init__(self, throttle_ms: int) -> None:
        self._throttle_ms = throttle_ms

    def throttle_ms(self, context: RequestContext) -> int:
        return self._throttle_ms if context.client_id == CLIENT_ID and context.api_key == LIST_GROUPS else 0


async def test_an_unauthenticated_client_may_only_ask_for_versions(tmp_path: Path) -> None:
    async with (
        run_cluster(tmp_path, rules=AccessRules(authenticator=NobodyYet())) as cluster,
        connect(cluster.bootstrap) as client,
    ):
        assert (await client.send(API_VERSIONS, 3, client_software_name="x", client_software_version="1")).api_keys
        with pytest.raises(asyncio.IncompleteReadError):
            await client.send(LIST_GROUPS, 3, states_filter=())


async def test_a_forbidden_operation_closes_the_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "stratalog_broker")
    rules = AccessRules(authenticator=AliceOnLoopback(), authorizer=OnlyGroupsForAlice())
    async with run_cluster(tmp_path, rules=rules) as cluster, connect(cluster.bootstrap) as client:
        assert (await client.send(42, 2, groups_names=())).results == ()
        with pytest.raises(asyncio.IncompleteReadError):
            await client.send(DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=False)
    assert "User:alice may not DESCRIBE any CLUSTER" in caplog.text


@pytest.mark.parametrize("throttle_ms", [1, 3_600_000])
async def test_a_client_over_its_quota_is_throttled(tmp_path: Path, throttle_ms: int) -> None:
    rules = AccessRules(quotas=SlowWireClients(throttle_ms))
    async with run_cluster(tmp_path, rules=rules) as cluster, connect(cluster.bootstrap) as client:
        answer = await client.send(LIST_GROUPS, 3, states_filter=())
        assert answer.throttle_time == timedelta(milliseconds=throttle_ms)
        (connection,) = cluster.broker.connections._connections
        assert isinstance(connection, ClientConnection)
        if throttle_ms == 1:
            answer = await client.send(DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=False)
            assert answer.throttle_time == timedelta(0)
        else:
            assert connection._is_paused


def test_every_api_but_api_versions_names_its_permission() -> None:
    assert [key for key, info in HANDLERS.items() if info.access is None] == [API_VERSIONS]
    assert HANDLERS[0].access == (Operation.WRITE, Resource.TOPIC)
