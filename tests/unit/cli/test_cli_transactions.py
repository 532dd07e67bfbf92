"""``stratalog txn``: transactions of an unmodified producer are listed, described and aborted, hanging ones found."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_served
from unit.broker.transactional import partition_of, transactional

from stratalog.app import stratalog
from stratalog.hanging_transactions import abort_hanging, find_hanging
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_metadata.records import Partition, partition_key

TOPIC = "target"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, brokers=2) as made:
        yield made


async def leave_open(cluster: MiniCluster, producer_id: int, topic: str = TOPIC) -> None:
    """Append a transaction's batch, an hour old or more, to a partition that no coordinator knows of."""
    place = partition_of(cluster, topic)
    partition = cluster.metadata.view.find(Partition, partition_key(place.topic_id, place.partition))
    assert partition is not None
    owner = cluster.brokers[partition.owner].server
    await until_served(owner, place.topic_id)
    await owner.partitions.append_internal(place, transactional(producer_id, 0, b"left"))


def run(bootstrap: str, *words: str) -> Any:
    done = CliRunner().invoke(stratalog, ["txn", *words, "--bootstrap", bootstrap, "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.output)


async def test_transactions_are_listed_described_and_aborted(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def steps() -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, 2, 1)])[TOPIC].result(60)
        made = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": "copier"})
        made.init_transactions(30)
        assert run(bootstrap, "describe", "copier")["state"] == "Empty"
        made.begin_transaction()
        for index in range(2):
            made.produce(TOPIC, b"value", partition=index)
        made.flush()
        (row,) = run(bootstrap, "list")["transactions"]
        assert (row["transactional_id"], row["state"]) == ("copier", "Ongoing")
        assert run(bootstrap, "list", "--state", "Empty")["transactions"] == []
        found = run(bootstrap, "describe", "copier")
        assert (found["state"], found["partitions"]) == ("Ongoing", ["target-0", "target-1"])
        assert found["coordinator"] == row["coordinator"]
        with pytest.raises(Invalid, match=r"Abort the transaction of copier in 2 partitions.*--yes"):
            run(bootstrap, "abort", "copier")
        assert run(bootstrap, "describe", "copier")["state"] == "Ongoing"
        assert run(bootstrap, "abort", "copier", "--yes")["partitions"] == ["target-0", "target-1"]
        with pytest.raises(KafkaException):
            made.commit_transaction(30)
        with pytest.raises(Conflict):
            run(bootstrap, "abort", "copier")
        with pytest.raises(NotFound):
            run(bootstrap, "describe", "nobody")
        with pytest.raises(Invalid):
            run(bootstrap, "list", "--state", "Nonsense")

    await in_thread(steps)


async def test_hanging_transactions_are_found_and_aborted_and_others_are_left_alone(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def begin() -> confluent_kafka.Producer:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(60)
        made = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": "copier"})
        made.init_transactions(30)
        made.begin_transaction()
        made.produce(TOPIC, b"of a live transaction", partition=0, timestamp=1_000)
        assert made.flush(60) == 0
        return made

    live = await in_thread(begin)
    await leave_open(cluster, producer_id=77)

    def find(*options: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = run(bootstrap, "find-hanging", *options)["transactions"]
        return rows

    def steps() -> None:
        (row,) = find()
        assert (row["topic"], row["partition"], row["producer_id"], row["start_offset"]) == (TOPIC, 0, 77, 1)
        assert find("--topic", TOPIC) == [row]
        assert find("--max-transaction-timeout", str(100 * 366 * 24 * 60)) == []
        with pytest.raises(NotFound):
            find("--topic", "absent")
        with pytest.raises(Invalid, match=r"producer 77 in target-0 since offset 1.*--yes"):
            find("--abort")
        assert find() == [row]
        assert [each["aborted"] for each in find("--abort", "--yes")] == [True]
        assert find("--abort") == []
        assert find() == []
        live.commit_transaction(30)
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "g", "isolation.level": "read_committed"}
        )
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        message = consumer.poll(30)
        assert message is not None
        assert message.value() == b"of a live transaction"
        consumer.close()

    await in_thread(steps)


async def test_a_transaction_that_has_ended_is_not_aborted(cluster: MiniCluster) -> None:
    def create() -> None:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(60)

    await in_thread(create)
    await leave_open(cluster, producer_id=77)
    (found,) = await find_hanging(cluster.bootstrap, None, 0)
    await abort_hanging(found)
    with pytest.raises(Conflict, match="already ended"):
        await abort_hanging(found)
