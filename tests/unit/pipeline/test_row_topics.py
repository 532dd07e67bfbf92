"""Topics that rows name in a column."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import in_thread, run_cluster

from stratalog_core.errors import NotFound
from stratalog_pipeline.kafka_sink import parse_write_options, send
from stratalog_pipeline.sink_markers import Unit
from stratalog_pipeline.sink_transactions import send_once


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
async def test_a_row_of_a_topic_that_does_not_exist_is_refused_and_creates_none(tmp_path: Path, delivery: str) -> None:
    async with run_cluster(tmp_path, auto_create_topics=True) as cluster:

        def steps() -> None:
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
            admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)
            given = {"kafka.bootstrap.servers": cluster.bootstrap, "topic": "t", "delivery": delivery}
            options = parse_write_options({**given, "kafka.topic.metadata.propagation.max.ms": "1000"})
            rows = pa.RecordBatch.from_pydict({"value": [b"v", b"w"], "topic": ["t", "mistyped"]})
            write = partial(send_once, unit=Unit(write="w", batch=0, task=0)) if options.is_exactly_once else send
            with pytest.raises(NotFound, match=r"topic 'mistyped': .*Unknown topic.*; create it first"):
                write([rows], options=options)
            assert set(admin.list_topics(timeout=30).topics) & {"t", "mistyped"} == {"t"}

        await in_thread(steps)
