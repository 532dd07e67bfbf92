"""Apicurio Registry with its storage in a topic: two registries share schemas, and a third finds them after a kill.

Each registry replays the topic into a database in its memory; a snapshot spares the beginning of the topic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ecosystem.processes import call, java, wait
from ecosystem.programs import apicurio

from stratalog.local.ports import free_ports

_SUBJECT: Final = "/subjects/flights"
_FIELD: Final = {"name": "flight", "type": "string"}
_COMPATIBLE: Final = {"name": "delay", "type": "int", "default": 0}
_INCOMPATIBLE: Final = {"name": "gate", "type": "int"}


def run(bootstrap: str, prefix: str, directory: Path) -> dict[str, str]:
    """Return the outcomes by step."""
    outcomes: dict[str, str] = {}
    with running(bootstrap, prefix, directory / "first") as first, running(bootstrap, prefix, directory / "second") as second:
        outcomes["register a schema"] = first("POST", f"{_SUBJECT}/versions", _schema())
        outcomes["ask for compatible ones"] = first("PUT", "/config/flights", {"compatibility": "BACKWARD"})
        outcomes["find it in another registry"] = _eventually(second, f"{_SUBJECT}/versions", "200 [1]")
        outcomes["register a compatible version"] = second("POST", f"{_SUBJECT}/versions", _schema(_COMPATIBLE))
        outcomes["register an incompatible version"] = second("POST", f"{_SUBJECT}/versions", _schema(_INCOMPATIBLE))
        outcomes["list versions"] = _eventually(first, f"{_SUBJECT}/versions", "200 [1, 2]")
        outcomes["take a snapshot"] = first.snapshot()
        outcomes["register another subject"] = first("POST", "/subjects/airports/versions", _schema())
    with running(bootstrap, prefix, directory / "third") as third:
        outcomes["list subjects after a kill"] = third("GET", "/subjects")
        outcomes["list versions after a kill"] = third("GET", f"{_SUBJECT}/versions")
        outcomes["read a schema after a kill"] = third("GET", f"{_SUBJECT}/versions/1/schema")
        outcomes["delete a subject"] = third("DELETE", _SUBJECT)
        outcomes["list subjects"] = third("GET", "/subjects")
    return outcomes


def _schema(*more: Mapping[str, object]) -> dict[str, str]:
    return {"schema": json.dumps({"type": "record", "name": "Flight", "fields": [_FIELD, *more]})}


class Registry:
    """Calls a registry by Confluent's interface; returns the status and the answer, or the status of an error."""

    def __init__(self, port: int, output: Path) -> None:
        self._base = f"http://127.0.0.1:{port}/apis"
        self.url = f"{self._base}/ccompat/v7"
        self.output = output

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        status, answer = call(method, self.url + path, body)
        return f"{status} {json.dumps(answer, sort_keys=True)}" if status == 200 else str(status)

    def snapshot(self) -> str:
        return str(call("POST", f"{self._base}/registry/v3/admin/snapshots")[0])


def _eventually(registry: Registry, path: str, answer: str) -> str:
    """Wait until a registry, which follows the topic, gives an answer; return it."""
    wait(lambda: registry("GET", path) == answer, registry.output)
    return answer


@contextmanager
def running(bootstrap: str, prefix: str, directory: Path) -> Iterator[Registry]:
    """A registry, killed at the end."""
    directory.mkdir()
    port, management_port = free_ports(2)
    settings = {
        "apicurio.storage.kind": "kafkasql",
        "apicurio.kafkasql.bootstrap.servers": bootstrap,
        "apicurio.kafkasql.topic": f"{prefix}-journal",
        "apicurio.kafkasql.snapshots.topic": f"{prefix}-snapshots",
        "apicurio.kafkasql.snapshots.location": str(directory),
        "apicurio.events.kafka.topic": f"{prefix}-events",
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(port),
        "quarkus.management.port": str(management_port),
    }
    arguments = [*(f"-D{name}={value}" for name, value in settings.items()), "-jar", str(apicurio())]
    with java(arguments, directory) as output:
        registry = Registry(port, output)
        wait(lambda: registry("GET", "/subjects").startswith("200"), output)
        yield registry
