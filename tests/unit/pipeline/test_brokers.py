"""Topics that the brokers serve, and tasks of their records. Spark's own connector reads the same in the integration tests."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic, TopicMetadata
from unit.broker.mini_cluster import in_thread, run_cluster, until_all_served
from unit.broker.raw_client import batch, produce
from unit.pipeline.cutting_proxy import LIST_OFFSETS, METADATA, Matches, run_behind_proxy
from unit.pipeline.malformed_headers import with_malformed_header_name

from stratalog_core.errors import Corrupt, Invalid, NotFound
from stratalog_pipeline import brokers, scan_plan
from stratalog_pipeline.arrow.messages import to_arrow
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, load_wanted
from stratalog_pipeline.kafka_sink import check_topic, parse_write_options
from stratalog_pipeline.options import ReadOptions, Subscribed, parse_options
from stratalog_pipeline.planning import BrokerSplit, OffsetRange, PartitionName
from stratalog_pipeline.scan_plan import partition_limits, plan_scan


class Late(AdminClient):
    """Lists a topic that was deleted since."""

    def list_topics(self, *given: Any, **named: Any) -> Any:
        found = super().list_topics(*given, **named)
        found.topics["gone"] = TopicMetadata()
        return found


async def test_a_topic_that_is_deleted_while_topics_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
            admin.create_topics([NewTopic("t", 2, 1)])["t"].result(30)
            monkeypatch.setattr(brokers, "AdminClient", Late)
            options = parse_options({"subscribePattern": ".*", "kafka.bootstrap.servers": cluster.bootstrap})
            (topic,) = Brokers(options).topics(options.wanted)
            assert (topic.name, topic.partition_count) == ("t", 2)

        await in_thread(steps)


def create_topic(bootstrap: str) -> None:
    """Create ``t`` with one partition. Blocks."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)


@pytest.mark.parametrize(
    "matches",
    [
        lambda key, request: key == METADATA,
        lambda key, request: key == METADATA and b"\x02t" in request,  # the description of the topic
        lambda key, request: key == LIST_OFFSETS,
    ],
    ids=["list of topics", "description", "offsets"],
)
@pytest.mark.parametrize("times", [1, 2])
async def test_a_broker_that_is_lost_while_it_is_asked_is_asked_again(tmp_path: Path, matches: Matches, times: int) -> None:
    """For an offset whose leader is lost, the client reports no error, but an offset that means nothing."""
    async with run_behind_proxy(tmp_path / "cluster") as (cluster, proxy):

        def steps() -> None:
            asked = Brokers(parse_options({"subscribe": "t", "kafka.bootstrap.servers": proxy.address}))
            proxy.matches, proxy.times = matches, times
            (topic,) = asked.topics(Subscribed(topics=("t",)))
            name = PartitionName(topic="t", topic_id=topic.topic_id, partition=0)
            assert asked.limits([name]) == {name: OffsetRange(first=0, end=3)}
            assert asked.offsets_at({name: 0}) == {name: 0}
            assert proxy.times == 0
            proxy.times = times
            assert check_topic(parse_write_options({"topic": "t", "kafka.bootstrap.servers": proxy.address})) == 1
            with pytest.raises(Invalid, match=r"has no config stratalog\.store\.url"):
                asked.store_url()

        await in_thread(lambda: create_topic(proxy.address))
        await until_all_served(cluster)
        await produce(await cluster.connect(), "t", batch(*[b"v"] * 3))
        await in_thread(steps)


@pytest.mark.parametrize("start", [{}, {"startingTimestamp": "0", "startingOffsetsByTimestampStrategy": "latest"}])
async def test_a_topic_that_is_deleted_while_a_read_is_planned_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: dict[str, str]
) -> None:
    """The bucket's manifests are read in between, which may take seconds."""
    (tmp_path / "store").mkdir()
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
            for future in admin.create_topics([NewTopic("t", 1, 1), NewTopic("gone", 1, 1)]).values():
                future.result(30)

            def load(bucket: Bucket, options: ReadOptions, name: PartitionName) -> Coroutine[Any, Any, History]:
                if name.topic == "gone":
                    admin.delete_topics(["gone"])["gone"].result(30)
                return load_wanted(bucket, options, name)

            monkeypatch.setattr(scan_plan, "load_wanted", load)
            given = {"path": str(tmp_path / "store"), "kafka.bootstrap.servers": cluster.bootstrap, **start}
            pattern = parse_options({**given, "subscribePattern": ".*"})
            with Bucket(pattern.store) as bucket:
                assert [str(name) for name in partition_limits(bucket, pattern)] == ["t-0"]
                with pytest.raises(NotFound, match="topic 'gone' is not in this bucket"):
                    partition_limits(bucket, parse_options({**given, "subscribe": "gone"}))

        await in_thread(steps)


@pytest.mark.parametrize("is_known_later", [True, False])
async def test_the_leader_of_a_new_topic_is_asked_until_it_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known_later: bool
) -> None:
    """A broker names the topic before all others know it. A stream of a pattern failed when a topic was created."""
    (tmp_path / "store").mkdir()
    asked = 0

    def limits(self: Brokers, names: Iterable[PartitionName]) -> dict[PartitionName, OffsetRange]:
        nonlocal asked
        asked += 1
        if asked <= 5 or not is_known_later:
            raise NotFound("Broker: Unknown topic or partition")
        return known(self, names)

    known = Brokers.limits
    monkeypatch.setattr(Brokers, "limits", limits)
    monkeypatch.setattr(scan_plan, "SURVEY_PAUSE_S", 0.01)
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            create_topic(cluster.bootstrap)
            given = {"path": str(tmp_path / "store"), "kafka.bootstrap.servers": cluster.bootstrap, "subscribePattern": ".*"}
            with Bucket(str(tmp_path / "store")) as bucket:
                if is_known_later:
                    assert [str(name) for name in partition_limits(bucket, parse_options(given))] == ["t-0"]
                    return
                monkeypatch.setattr(scan_plan, "SURVEY_S_MAX", 0.1)
                with pytest.raises(NotFound, match="Unknown topic"):
                    partition_limits(bucket, parse_options(given))

        await in_thread(steps)


@pytest.mark.parametrize(("options", "tasks"), [({}, 1), ({"minPartitions": "7"}, 7), ({"maxRecordsPerPartition": "90"}, 12)])
async def test_records_that_only_brokers_have_are_cut_into_tasks(tmp_path: Path, options: dict[str, str], tasks: int) -> None:
    """As by Spark's Kafka source."""
    (tmp_path / "store").mkdir()
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            given = {"path": str(tmp_path / "store"), "subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap, **options}
            parsed = parse_options(given)
            with Bucket(parsed.store) as bucket:
                plan = plan_scan(bucket, parsed)
            assert len(plan.tasks) == tasks
            found = [
                row["offset"]
                for split in chain.from_iterable(plan.tasks)
                if isinstance(split, BrokerSplit)
                for rows in to_arrow(Brokers(parsed).read(split), ("offset",))
                for row in rows.to_pylist()
            ]
            assert found == list(range(1001))

        await in_thread(lambda: create_topic(cluster.bootstrap))
        await until_all_served(cluster)
        client = await cluster.connect()
        await produce(client, "t", batch(*[b"v"] * 1001))
        await in_thread(steps)


async def test_a_header_name_that_the_client_cannot_read_fails_a_read_of_headers_only(tmp_path: Path) -> None:
    """The client itself ends the process by a segmentation fault."""
    (tmp_path / "store").mkdir()
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            options = parse_options({"subscribe": "t", "kafka.bootstrap.servers": cluster.bootstrap})
            (topic,) = Brokers(options).topics(options.wanted)
            name = PartitionName(topic="t", topic_id=topic.topic_id, partition=0)
            split = BrokerSplit(name=name, offsets=OffsetRange(first=0, end=101))
            read = Brokers(options).read
            assert sum(rows.num_rows for rows in to_arrow(read(split), ("value",))) == 101
            with pytest.raises(Corrupt, match=r"t-0, offset 100: the name of a header is not UTF-8.* leave out includeHeaders"):
                list(to_arrow(read(split), ("value", "headers")))

        await in_thread(lambda: create_topic(cluster.bootstrap))
        await until_all_served(cluster)
        client = await cluster.connect()
        # After so many, Python calls the client's method directly, without looking at what it returns.
        await produce(client, "t", batch(*[b"v"] * 100))
        await produce(client, "t", with_malformed_header_name())
        await in_thread(steps)
