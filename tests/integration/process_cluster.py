"""The cluster for the integration tests, controlled with the ``stratalog`` command as a user would."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.raw_client import RawClient, request

COMMAND_TIMEOUT_S = 120
KEPT_FOR_EVER = {"retention.ms": "-1"}
"""For records with old timestamps: retention would remove them as soon as their ledger is sealed, as by a rebalance."""
_METADATA = 3
_numbers = itertools.count(1)


class ProcessCluster:
    """The cluster under ``data``, controlled with the ``stratalog`` command."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._admin: AdminClient | None = None

    @property
    def bootstrap(self) -> str:
        return self._state("bootstrap")

    @property
    def metadata(self) -> str:
        """The metadata nodes, as HOST:PORT,…."""
        return self._state("metadata")

    @property
    def store(self) -> str:
        """The URL of the bucket."""
        return self._state("store")

    def _state(self, name: str) -> str:
        return str(json.loads((self.data / "cluster.json").read_text())[name])

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return self._admin

    def run(self, *words: str, stdin: str | None = None, expect: int = 0) -> str:
        """Run one ``stratalog`` command on this cluster; return its standard output."""
        command = [sys.executable, "-m", "stratalog", *words, "--data", str(self.data)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        assert done.returncode == expect, f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-3000:]}"
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))

    def json_after(self, stdin: str, *words: str) -> Any:
        return json.loads(self.run(*words, "--json", stdin=stdin))

    def processes(self, role: str) -> list[dict[str, Any]]:
        document = json.loads((self.data / "cluster.json").read_text())
        return [process for process in document["processes"] if process["role"] == role]

    def kill(self, *names: str) -> None:
        self.run("cluster", "kill", *names)

    def restart(self, *names: str) -> None:
        self.run("cluster", "restart", *names)

    def new_topic(self, partitions: int = 1, configs: Mapping[str, str] | None = None, copies: int = 3) -> str:
        """Create a new topic for a test, with ``copies`` copies of everything; return when all brokers serve it."""
        name = f"topic-{next(_numbers)}"
        new = NewTopic(name, num_partitions=partitions, replication_factor=copies, config=dict(configs or {}))
        for future in self.admin.create_topics([new]).values():
            future.result(COMMAND_TIMEOUT_S)
        until_all_know(self.bootstrap, name)
        return name

    def fill(self, topic: str, *values: str) -> None:
        """Append records; return when all are acknowledged."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True, "log_level": 0})
        failures: list[object] = []
        for value in values:
            producer.produce(topic, value, on_delivery=lambda failure, _: failures.extend([failure] if failure else []))
        assert producer.flush(COMMAND_TIMEOUT_S) == 0
        assert failures == []

    def keep_hot(self, topic: str) -> None:
        """Copy no more of the topic to the bucket: a broker that misses its lease leaves a sealed ledger, which is copied."""
        self.run("topic", "config", topic, "--set", "remote.log.copy.disable=true")

    def new_group(self) -> str:
        return f"group-{next(_numbers)}"


def until_all_know(bootstrap: str, topic: str) -> None:
    """Wait until all running brokers name the same topic and its owners: only the one that created it has waited for that."""

    wanted = request(_METADATA, 12, "MetadataRequestTopic", topic_id=None, name=topic)
    values = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
    asked = request(_METADATA, 12, "MetadataRequest", topics=(wanted,), **values)

    async def known(address: str) -> object:
        """The id of the topic there; ``None`` if it is not known or has no owners yet."""
        client = await RawClient.connect(address)
        try:
            (found,) = (await client.call(_METADATA, 12, asked)).topics
        finally:
            await client.close()
        is_owned = bool(found.partitions) and all(partition.leader_id >= 0 for partition in found.partitions)
        return found.topic_id if is_owned else None

    async def all_know() -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while True:
            answers = await asyncio.gather(*map(known, bootstrap.split(",")), return_exceptions=True)
            # A test may have killed a broker.
            found = {answer for answer in answers if not isinstance(answer, OSError | EOFError)}
            if len(found) == 1 and isinstance(next(iter(found)), UUID):
                return
            assert time.monotonic() < deadline, f"brokers have {found} for {topic}"
            await asyncio.sleep(0.05)

    with ThreadPoolExecutor(1) as other:  # A test may have an event loop of its own.
        other.submit(asyncio.run, all_know()).result()
