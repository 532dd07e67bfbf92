"""What Spark's writers do when a write fails, without a Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from unit.broker.mini_cluster import in_thread, run_cluster

from stratalog_core.kafka_clients import list_offsets
from stratalog_pipeline.kafka_sink import parse_write_options
from stratalog_pipeline.sink_markers import Unit
from stratalog_pipeline.sink_transactions import _begin
from stratalog_pipeline.spark.writer import KafkaStreamWriter, KafkaWriter, Sent


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_write_that_fails_ends_the_transactions_of_tasks_that_were_killed(tmp_path: Path, is_stream: bool) -> None:
    async with run_cluster(tmp_path / "cluster") as cluster:
        servers: dict[str, str | int | float | bool] = {"bootstrap.servers": cluster.bootstrap, "log_level": 0}

        def stable_end(admin: AdminClient) -> int:
            wanted = {TopicPartition("t", 0): OffsetSpec.latest()}
            level = IsolationLevel.READ_COMMITTED
            return list_offsets(lambda: admin, wanted, 30, isolation_level=level)["t", 0]

        def steps() -> None:
            admin = AdminClient(servers)
            admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)
            options = parse_write_options({"kafka.bootstrap.servers": cluster.bootstrap, "topic": "t", "writeId": "w"})
            killed = _begin(options, Unit(write="w", batch=0, task=1))
            killed.begin_transaction()
            killed.produce("t", b"v")
            assert killed.flush(30) == 0
            assert stable_end(admin) == 0
            messages = [Sent(rows=0, unit=Unit(write="w", batch=0, task=0)), None]
            if is_stream:
                KafkaStreamWriter(options).abort(messages, 0)
            else:
                KafkaWriter(options).abort(messages)
            assert stable_end(admin) == 2

        await in_thread(steps)
