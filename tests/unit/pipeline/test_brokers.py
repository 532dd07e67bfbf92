"""Topics that the brokers serve. Reads of records are tested with Spark's own connector in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic, TopicMetadata
from unit.broker.mini_cluster import in_thread, run_cluster

from stratalog_pipeline import brokers
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.options import parse_options


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
