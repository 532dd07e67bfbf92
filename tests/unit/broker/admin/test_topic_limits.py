"""Caps on topics and partitions: refused with Kafka's POLICY_VIOLATION, by whichever request they would be passed."""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import NewPartitions, NewTopic
from unit.broker.admin.test_topic_administration import admin_of, only, refused
from unit.broker.mini_cluster import in_thread, run_cluster

VIOLATION = confluent_kafka.KafkaError.POLICY_VIOLATION


async def test_no_request_passes_the_caps(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, topics_max=3, partitions_max=10, request_partitions_max=6) as cluster:
        admin = admin_of(cluster)

        def scenario() -> None:
            only(admin.create_topics([NewTopic("first", 4, 1)]))
            error = refused(admin.create_topics([NewTopic("large", 7, 1)]))
            assert (error.code(), "request_partitions_max is 6" in error.str()) == (VIOLATION, True)
            for future in admin.create_topics([NewTopic(f"many-{number}", 1, 1) for number in range(3)]).values():
                failure = future.exception(60)
                assert failure is not None
                assert failure.args[0].code() == VIOLATION, "together they are one topic too many"
            only(admin.create_partitions([NewPartitions("first", 6)]))
            error = refused(admin.create_partitions([NewPartitions("first", 11)]))
            assert (error.code(), "there would be 11 partitions" in error.str()) == (VIOLATION, True)
            assert refused(admin.create_partitions([NewPartitions("first", 13)])).code() == VIOLATION, "one request too large"
            only(admin.create_topics([NewTopic("second", 4, 1)]))
            error = refused(admin.create_topics([NewTopic("third", 1, 1)]))
            assert (error.code(), "partitions_max is 10" in error.str()) == (VIOLATION, True)
            assert set(admin.list_topics(timeout=60).topics) >= {"first", "second"}
            assert "third" not in admin.list_topics(timeout=60).topics

        await in_thread(scenario)
