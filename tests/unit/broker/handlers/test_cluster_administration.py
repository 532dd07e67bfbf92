"""The metadata quorum, unregistration, authorized operations and endpoint types, in every version over the wire."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import create, find, join, versions
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.handlers import READ_ONLY_HANDLERS
from stratalog_broker.handlers.describe_quorum import TOPIC as QUORUM_TOPIC
from stratalog_metadata.records import DrainedBroker
from stratalog_metadata.state.commands import Command, Put

NONE = ErrorCode.none
UNKNOWN = -(2**31)


async def describe_quorum(client: WireClient, version: int, topic: str = QUORUM_TOPIC) -> Any:
    row = part(55, version, "PartitionData", partition_index=0)
    answer = await client.send(55, version, topics=(part(55, version, "TopicData", topic_name=topic, partitions=(row,)),))
    assert answer.error_code is NONE
    return answer


async def test_the_metadata_quorum_is_described(mini_cluster: MiniCluster) -> None:
    status = await mini_cluster.metadata.quorum_status()
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(55):
            answer = await describe_quorum(client, version)
            (found,) = answer.topics[0].partitions
            (voter,) = found.current_voters
            assert (found.error_code, found.leader_id, found.leader_epoch) == (NONE, status.leader, status.term)
            assert found.high_watermark > status.commit_index
            assert (voter.replica_id, found.observers) == (status.leader, ())
            assert voter.log_end_offset >= found.high_watermark
            if version >= 1:
                assert voter.last_fetch_timestamp == voter.last_caught_up_timestamp > 0
            if version >= 2:
                assert str(voter.replica_directory_id) == status.members[0].identity
                ((node,),) = (answer.nodes,)
                assert f"{node.listeners[0].host}:{node.listeners[0].port}" == status.members[0].address
            (other,) = (await describe_quorum(client, version, "other")).topics[0].partitions
            assert other.error_code is ErrorCode.unknown_topic_or_partition


def test_an_archive_has_no_quorum_to_describe() -> None:
    assert 55 not in READ_ONLY_HANDLERS


async def test_only_a_stopped_and_drained_broker_can_be_unregistered(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        answer = await client.send(64, 0, broker_id=1)
        assert (answer.error_code, answer.error_message) == (ErrorCode.invalid_request, "broker 1 is live: stop it first")
        assert (await client.send(64, 0, broker_id=9)).error_code is ErrorCode.broker_id_not_registered
        await mini_cluster.metadata.propose(Command(updates=(Put(record=DrainedBroker(broker_id=9)),)))
        await mini_cluster.refresh()
        assert (await client.send(64, 0, broker_id=9)).error_code is NONE
        assert not list(mini_cluster.broker.metadata.view.all(DrainedBroker))


TOPIC_BITS, CLUSTER_BITS, GROUP_BITS = 0b110111111000, 0b1111110100000, 0b110101001000


async def test_everybody_may_do_everything_if_the_request_asks(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        for version in versions(3)[8:]:
            for wanted in (False, True):
                answer = await client.send(
                    3, version, topics=None, allow_auto_topic_creation=False,
                    include_topic_authorized_operations=wanted, include_cluster_authorized_operations=wanted,
                )  # fmt: skip
                assert answer.topics[0].topic_authorized_operations == (TOPIC_BITS if wanted else UNKNOWN)
                if version <= 10:
                    assert answer.cluster_authorized_operations == (CLUSTER_BITS if wanted else UNKNOWN)
        for version in versions(60):
            fields = {"endpoint_type": 1, "include_fenced_brokers": False}
            answer = await client.send(60, version, **fields, include_cluster_authorized_operations=True)
            assert answer.cluster_authorized_operations == CLUSTER_BITS
        await find(client, 6)
        await join(client, 9)
        for version in versions(15)[3:]:
            answer = await client.send(15, version, groups=("group", "unknown"), include_authorized_operations=True)
            assert [row.authorized_operations for row in answer.groups] == [GROUP_BITS, UNKNOWN]


@pytest.mark.parametrize(
    ("endpoint_type", "code"), [(2, ErrorCode.mismatched_endpoint_type), (3, ErrorCode.unsupported_endpoint_type)]
)
async def test_brokers_list_no_controllers(mini_cluster: MiniCluster, endpoint_type: int, code: ErrorCode) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        answer = await client.send(
            60, 1, endpoint_type=endpoint_type, include_cluster_authorized_operations=False, include_fenced_brokers=False
        )
        assert (answer.error_code, answer.brokers) == (code, ())
