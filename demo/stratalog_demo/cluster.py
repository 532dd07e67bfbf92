"""The cluster that the demo runs against, controlled with the ``stratalog`` command as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stratalog.local.secrets import store_environment
from stratalog_demo.clients import DemoFailed

COMMAND_TIMEOUT_S = 180


class Cluster:
    """A local cluster of real processes with its data under ``data``."""

    def __init__(self, data: Path, store_arguments: list[str]) -> None:
        self.data = data
        self._store_arguments = store_arguments

    def start(self) -> None:
        sizes = ["--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1"]
        self.run("cluster", "start", *sizes, *self._store_arguments)
        # The cluster's own MinIO has its own credentials; Spark and boto3 look for them in the environment.
        os.environ.update(store_environment(self.data))

    def describe(self) -> dict[str, Any]:
        """Return ``cluster.json``: bootstrap, store, and the processes with name, role, pid and address."""
        document: dict[str, Any] = json.loads((self.data / "cluster.json").read_text())
        return document

    @property
    def bootstrap(self) -> str:
        return str(self.describe()["bootstrap"])

    @property
    def store(self) -> str:
        return str(self.describe()["store"])

    def names(self, role: str) -> list[str]:
        return [process["name"] for process in self.describe()["processes"] if process["role"] == role]

    def run(self, *words: str) -> str:
        """Run one command and return its output. Raises ``DemoFailed`` with its output and errors if it fails."""
        done = self.attempt(*words)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-2000:]
            raise DemoFailed(f"`stratalog {' '.join(words)}` ended with {done.returncode}: {said}")
        return done.stdout

    def attempt(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command, whatever its exit code."""
        command = [sys.executable, "-m", "stratalog", *words, "--data", str(self.data)]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))
