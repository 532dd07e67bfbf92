"""Hot and cold bytes of owned partitions, in every version over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import create, versions
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_all_served
from unit.broker.raw_client import batch, produce
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.protocol.entities import encode_response, response_factory
from stratalog_broker.protocol.log_dirs import encode_dir
from stratalog_metadata.records import ManifestPointer, TierRequest, Topic, manifest_pointer_key, topic_key
from stratalog_metadata.state.commands import Command, Put

Sizes = dict[str, dict[tuple[str, int], int]]


async def sizes(client: WireClient, version: int, *topics: tuple[str, tuple[int, ...]]) -> Sizes:
    wanted = tuple(part(35, version, "DescribableLogDirTopic", topic=name, partitions=indexes) for name, indexes in topics)
    answer = await client.send(35, version, topics=wanted or None)
    assert all(one.error_code is ErrorCode.none for one in answer.results)
    assert {row.offset_lag for one in answer.results for topic in one.topics for row in topic.partitions} <= {0}
    return {
        one.log_dir: {(topic.name, row.partition_index): row.partition_size for topic in one.topics for row in topic.partitions}
        for one in answer.results
    }


def topic_of(cluster: MiniCluster, name: str) -> Topic:
    topic = cluster.broker.metadata.view.find(Topic, topic_key(name))
    assert topic is not None
    return topic


async def test_bytes_are_hot_until_they_are_offloaded(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster, connect(cluster.bootstrap) as client:
        await create(client, "flights", "trains")
        topic = topic_of(cluster, "flights")
        await until_all_served(cluster)
        raw, records = await cluster.connect(), batch(b"v" * 1000, b"w" * 1000)
        await produce(raw, "flights", records)
        for version in versions(35):
            found = await sizes(client, version)
            assert found["hot"][("flights", 0)] == len(records)
            assert set(found["hot"].values()) == {len(records), 0}
            assert set(found["cold"].values()) == {0}
            assert found["hot"].keys() == found["cold"].keys() == {(n, i) for n in ("flights", "trains") for i in (0, 1)}
            assert (await sizes(client, version, ("trains", (1, 9)), ("unknown", (0,))))["hot"] == {("trains", 1): 0}
        await cluster.start_tiering()
        request = TierRequest(topic_id=topic.topic_id, index=0, delete_hot=True)
        await cluster.metadata.propose(Command(updates=(Put(record=request),)))
        async with asyncio.timeout(WAIT_S):
            while (found := await sizes(client, 5))["hot"][("flights", 0)] or not found["cold"][("flights", 0)]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        pointer = cluster.broker.metadata.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, 0))
        assert pointer is not None
        assert found["cold"][("flights", 0)] == pointer.cold_bytes


def kio_dir(version: int, name: str, topics: dict[str, list[tuple[int, int]]]) -> Any:
    new = response_factory(35, version)
    return new(
        "DescribeLogDirsResult", error_code=ErrorCode.none, log_dir=name,
        topics=tuple(
            new(
                "DescribeLogDirsTopic", name=topic,
                partitions=tuple(
                    new("DescribeLogDirsPartition", partition_index=i, partition_size=b, offset_lag=0, is_future_key=False)
                    for i, b in rows
                ),
            )
            for topic, rows in topics.items()
        ),
    )  # fmt: skip


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
partitions = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)), max_size=140)


@given(version=st.sampled_from(versions(35)), topics=st.dictionaries(names, partitions, max_size=3))
@settings(max_examples=50, deadline=None)
def test_the_bytes_are_kios(version: int, topics: dict[str, list[tuple[int, int]]]) -> None:
    assert encode_dir(response_factory(35, version), version, "hot", topics) == encode_response(kio_dir(version, "hot", topics))
