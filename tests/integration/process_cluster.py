"""The cluster for the integration tests, controlled with the ``stratalog`` command as a user would."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

COMMAND_TIMEOUT_S = 120
KEPT_FOR_EVER = {"retention.ms": "-1"}
"""For records with old timestamps: retention would remove them as soon as their ledger is sealed, as by a rebalance."""
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
        """Create a new topic for a test, with ``copies`` copies of everything."""
        name = f"topic-{next(_numbers)}"
        new = NewTopic(name, num_partitions=partitions, replication_factor=copies, config=dict(configs or {}))
        for future in self.admin.create_topics([new]).values():
            future.result(COMMAND_TIMEOUT_S)
        return name

    def fill(self, topic: str, *values: str) -> None:
        """Append records; return when all are acknowledged."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
        failures: list[object] = []
        for value in values:
            producer.produce(topic, value, on_delivery=lambda failure, _: failures.extend([failure] if failure else []))
        assert producer.flush(COMMAND_TIMEOUT_S) == 0
        assert failures == []

    def new_group(self) -> str:
        return f"group-{next(_numbers)}"
