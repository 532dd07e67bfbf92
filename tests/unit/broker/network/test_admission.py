"""Admission: requests before authentication, requests that authorization refuses, and throttled clients."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import run_cluster
from unit.broker.wire_client import CLIENT_ID, connect, part

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.network.connection import ClientConnection
from stratalog_broker.requests.access import Access, AccessRules, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.principal import ANONYMOUS, Principal

API_VERSIONS, LIST_GROUPS, DESCRIBE_CLUSTER = 18, 16, 60
HAND_ENCODED = {0: (3, 9), 1: (4, 7, 12), 2: (2, 6), 8: (3, 8), 9: (3, 8)}
"""Versions of Produce, Fetch, ListOffsets, OffsetCommit and OffsetFetch, one for each layout of the response."""


class NobodyYet:
    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        return None


class AliceOnLoopback:
    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        return Principal("User", "alice") if (listener, client_host) == ("", "127.0.0.1") else ANONYMOUS


class OnlyGroupsForAlice:
    def allows(self, principal: Principal, access: Access, name: str) -> bool:
        return str(principal) == "User:alice" and access.resource is Resource.GROUP

    def allows_some(self, principal: Principal, access: Access) -> bool:
        return self.allows(principal, access, "")


class SlowWireClients:
    """Throttles the client ``CLIENT_ID``, but not after DescribeCluster."""

    def __init__(self, throttle_ms: int) -> None:
        self._throttle_ms = throttle_ms

    def throttle_ms(self, context: RequestContext) -> int:
        return self._throttle_ms if context.client_id == CLIENT_ID and context.api_key != DESCRIBE_CLUSTER else 0


async def test_an_unauthenticated_client_may_only_ask_for_versions(tmp_path: Path) -> None:
    async with (
        run_cluster(tmp_path, rules=AccessRules(authenticator=NobodyYet())) as cluster,
        connect(cluster.bootstrap) as client,
    ):
        assert (await client.send(API_VERSIONS, 3, client_software_name="x", client_software_version="1")).api_keys
        with pytest.raises(asyncio.IncompleteReadError):
            await client.send(LIST_GROUPS, 3, states_filter=())


async def test_the_authorizer_is_asked_for_the_principal_of_the_connection(tmp_path: Path) -> None:
    rules = AccessRules(authenticator=AliceOnLoopback(), authorizer=OnlyGroupsForAlice())
    async with run_cluster(tmp_path, rules=rules) as cluster, connect(cluster.bootstrap) as client:
        (row,) = (await client.send(42, 2, groups_names=("group",))).results
        assert row.error_code is ErrorCode.coordinator_not_available
        configs = part(32, 4, "DescribeConfigsResource", resource_type=4, resource_name="1", configuration_keys=None)
        (row,) = (await client.send(32, 4, resources=(configs,), include_synonyms=False, include_documentation=False)).results
        assert row.error_code is ErrorCode.cluster_authorization_failed
        assert row.error_message == "User:alice may not DESCRIBE_CONFIGS CLUSTER kafka-cluster"


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


async def test_every_encoder_sends_the_throttle_time(tmp_path: Path) -> None:
    fields = {
        "acks": -1, "timeout": timedelta(seconds=1), "transactional_id": None, "topic_data": (), "topics": (), "group_id": "g",
        "generation_id_or_member_epoch": -1, "member_id": "", "group_instance_id": None, "groups": (), "replica_id": -1,
        "max_wait": timedelta(0), "min_bytes": 0, "isolation_level": 0, "forgotten_topics_data": (), "rack_id": "",
    }  # fmt: skip
    async with (
        run_cluster(tmp_path, rules=AccessRules(quotas=SlowWireClients(1))) as cluster,
        connect(cluster.bootstrap) as client,
    ):
        for api_key, versions in HAND_ENCODED.items():
            for version in versions:
                answer = await client.send(api_key, version, **fields)
                assert answer.throttle_time == timedelta(milliseconds=1), (api_key, version)


def test_every_api_but_api_versions_names_its_permission() -> None:
    assert [key for key, info in HANDLERS.items() if info.access is None] == [API_VERSIONS]
    assert HANDLERS[0].access == (Operation.WRITE, Resource.TOPIC)
