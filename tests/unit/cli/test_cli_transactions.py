"""``stratalog txn``: transactions of an unmodified producer are listed, described and aborted."""

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
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

from stratalog.app import stratalog
from stratalog_core.errors import Conflict, Invalid, NotFound

TOPIC = "target"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, brokers=2) as made:
        yield made


def run(bootstrap: str, *words: str) -> Any:
    done = CliRunner().invoke(stratalog, ["txn", *words, "--bootstrap", bootstrap, "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.output)


async def test_transactions_are_listed_described_and_aborted(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def steps() -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, 2, 1)])[TOPIC].result(20)
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
        assert run(bootstrap, "abort", "copier")["partitions"] == ["target-0", "target-1"]
        with pytest.raises(KafkaException):
            made.commit_transaction(30)
        with pytest.raises(Conflict):
            run(bootstrap, "abort", "copier")
        with pytest.raises(NotFound):
            run(bootstrap, "describe", "nobody")
        with pytest.raises(Invalid):
            run(bootstrap, "list", "--state", "Nonsense")

    await in_thread(steps)
