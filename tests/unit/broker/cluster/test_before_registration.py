"""A broker answers clients from the moment that it listens, which is before the quorum knows it."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import in_thread, run_cluster

from stratalog.local.ports import free_ports


def _create(admin: AdminClient, topic: str) -> None:
    (created,) = admin.create_topics([NewTopic(topic, 1, 1)]).values()
    created.result(60)


async def test_a_client_that_asks_before_the_broker_is_registered_creates_topics_after_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)  # No connection of a client gets it while the broker is down.
    address = f"127.0.0.1:{port}"
    async with run_cluster(tmp_path, listen=(address,)) as cluster:
        admin = AdminClient({"bootstrap.servers": address, "reconnect.backoff.max.ms": 100, "log_level": 0})
        await in_thread(lambda: _create(admin, "before"))
        await cluster.brokers.pop(1).stop()
        restarted = await cluster.start_broker(1, listen=(address,), registers=False)
        listed = await in_thread(lambda: admin.list_topics(timeout=60))
        assert (set(listed.brokers), listed.controller_id) == ({1}, 1)
        await restarted.server.start()
        await in_thread(lambda: _create(admin, "after"))
