"""Configs of groups, and the list of resources with configs, in every version over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import create, described, versions
from unit.broker.mini_cluster import MiniCluster, run_cluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.configs.group_configs import (
    ASSIGNMENT_INTERVAL_MS,
    HEARTBEAT_INTERVAL_MS,
    SESSION_TIMEOUT_MS,
    GroupConfigs,
)
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.core.consumer.settings import Timeouts
from stratalog_broker.coordination.groups.service import limits_of
from stratalog_metadata.client.named_configs import configs_of
from stratalog_metadata.records import GROUP_CONFIGS
from stratalog_metadata.topic_rules.config_keys import ConfigSource

NONE = ErrorCode.none
GROUP, TOPIC, BROKER = 32, 2, 4


async def alter(client: WireClient, version: int, name: str, *edits: tuple[str, int, str | None]) -> Any:
    configs = tuple(
        part(44, version, "AlterableConfig", name=config, config_operation=operation, value=value)
        for config, operation, value in edits
    )
    resource = part(44, version, "AlterConfigsResource", resource_type=GROUP, resource_name=name, configs=configs)
    answer = await client.send(44, version, resources=(resource,), validate_only=False)
    return answer.responses[0]


async def test_configs_of_a_group_are_set_described_and_deleted(mini_cluster: MiniCluster) -> None:
    view = mini_cluster.broker.metadata.view
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(44):
            row = await alter(client, version, "readers", (SESSION_TIMEOUT_MS, 0, "50000"))
            assert row.error_code is NONE
            found = await described(client, 4, GROUP, "readers")
            assert {name: row.value for name, row in found.items()} == {
                ASSIGNMENT_INTERVAL_MS: "1000",
                HEARTBEAT_INTERVAL_MS: "5000",
                SESSION_TIMEOUT_MS: "50000",
            }
            assert found[SESSION_TIMEOUT_MS].config_source == ConfigSource.GROUP
            assert found[HEARTBEAT_INTERVAL_MS].config_source == ConfigSource.DEFAULT
            assert GroupConfigs.of(configs_of(view, GROUP_CONFIGS, "readers")).session_timeout_ms == 50_000
            row = await alter(client, version, "readers", (SESSION_TIMEOUT_MS, 1, None))
            assert row.error_code is NONE
            assert configs_of(view, GROUP_CONFIGS, "readers") == {}
            assert (await resources(client, GROUP)) == []
        assert (await described(client, 4, GROUP, "never-seen"))[SESSION_TIMEOUT_MS].value == "45000"


async def test_the_coordinator_takes_the_configs_of_each_group(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        for config, value in ((SESSION_TIMEOUT_MS, "50000"), (HEARTBEAT_INTERVAL_MS, "7000"), (ASSIGNMENT_INTERVAL_MS, "0")):
            assert (await alter(client, 1, "readers", (config, 0, value))).error_code is NONE
    timeouts_of = limits_of(BrokerSettings(broker_id=1), mini_cluster.broker.metadata.view).consumer.timeouts_of
    assert timeouts_of("readers") == Timeouts(session_ms=50_000, heartbeat_ms=7_000, assignment_ms=0)
    assert timeouts_of("others") == Timeouts(session_ms=45_000, heartbeat_ms=5_000, assignment_ms=1_000)


@pytest.mark.parametrize(
    ("config", "value", "complaint"),
    [
        (SESSION_TIMEOUT_MS, "44999", "minimum is 45000"),
        (HEARTBEAT_INTERVAL_MS, "15001", "maximum is 15000"),
        (ASSIGNMENT_INTERVAL_MS, "15001", "maximum is 15000"),
        ("share.session.timeout.ms", "45000", "unknown group config"),
        (SESSION_TIMEOUT_MS, "9" * 5000, "has 5000 characters; maximum is"),
    ],
)
async def test_a_config_that_is_not_valid_is_refused(
    mini_cluster: MiniCluster, config: str, value: str, complaint: str
) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        row = await alter(client, 1, "readers", (config, 0, value))
        assert row.error_code is ErrorCode.invalid_config
        assert complaint in row.error_message
        row = await alter(client, 1, "", (SESSION_TIMEOUT_MS, 0, "45000"))
        assert row.error_code is ErrorCode.invalid_request
        row = await alter(client, 1, "readers", (SESSION_TIMEOUT_MS, 2, "45000"))
        assert "is not a list" in row.error_message


async def resources(client: WireClient, *kinds: int) -> list[tuple[int, str]]:
    answer = await client.send(74, 1, resource_types=kinds)
    assert answer.error_code is NONE
    return [(row.resource_type, row.resource_name) for row in answer.config_resources]


async def test_resources_with_configs_are_listed_by_type(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        await alter(client, 1, "readers", (SESSION_TIMEOUT_MS, 0, "50000"))
        expected = [(TOPIC, "flights"), (BROKER, "1"), (GROUP, "readers")]
        assert await resources(client) == expected
        assert await resources(client, GROUP, BROKER) == expected[1:]
        answer = await client.send(74, 1, resource_types=(8,))
        assert (answer.error_code, answer.config_resources) == (ErrorCode.unsupported_version, ())


async def test_the_defaults_of_groups_are_settings_of_the_broker(tmp_path: Path) -> None:
    settings = {"group_consumer_session_timeout_ms": 50_000, "group_consumer_heartbeat_interval_ms": 6_000}
    settings["group_consumer_assignment_interval_ms"] = 2_000
    async with run_cluster(tmp_path, bookies=1, brokers=1, **settings) as cluster, connect(cluster.bootstrap) as client:
        found = await described(client, 4, GROUP, "readers")
        assert {name: row.value for name, row in found.items()} == {
            ASSIGNMENT_INTERVAL_MS: "2000",
            HEARTBEAT_INTERVAL_MS: "6000",
            SESSION_TIMEOUT_MS: "50000",
        }
        names = {name: [one.name for one in row.synonyms] for name, row in found.items()}
        assert names == {
            ASSIGNMENT_INTERVAL_MS: ["group.consumer.assignment.interval.ms"],
            HEARTBEAT_INTERVAL_MS: ["group.consumer.heartbeat.interval.ms"],
            SESSION_TIMEOUT_MS: ["group.consumer.session.timeout.ms"],
        }
