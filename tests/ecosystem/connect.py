"""Kafka Connect, distributed: two workers carry a file through a topic exactly once; the one that runs the source is killed.

Connect keeps configurations, positions and states in compacted topics, divides its work by a group protocol of its own, and
fences the tasks of before by their transactional ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ecosystem.processes import call, java, wait, write_properties
from ecosystem.topics import create, read

from stratalog.local.ports import free_ports
from stratalog_loadgen.java_tools import KAFKA_VERSION, SLF4J_VERSION, jars

JARS: Final = (
    *(("org.apache.kafka", f"connect-{part}", KAFKA_VERSION) for part in ("runtime", "file", "mirror")),
    ("org.slf4j", "slf4j-simple", SLF4J_VERSION),
)
LINES: Final = 1_500
"""Fewer than the file source's ``batch.size``: lines beyond it stay in the source's buffer until the file grows again."""
_GROWTH: Final = 25
_STRINGS: Final = "org.apache.kafka.connect.storage.StringConverter"
_OK: Final = (200, 201, 202, 204)


def class_path() -> str:
    """Of Connect and MirrorMaker; fetched by Maven at the first call."""
    return f"{jars('connect', KAFKA_VERSION, JARS)}/*"


class SourceFile:
    """A file that grows by a few lines at a time, so that the source makes many transactions."""

    def __init__(self, path: Path) -> None:
        self.path, self._written = path, 0
        path.touch()

    @property
    def lines(self) -> list[str]:
        return [f"line {number}" for number in range(LINES)]

    def before_the_last_line(self) -> dict[str, Any]:
        """Return the position as Connect's REST interface takes it."""
        position = self.path.stat().st_size - len(self.lines[-1]) - 1
        return {"offsets": [{"partition": {"filename": str(self.path)}, "offset": {"position": position}}]}

    def grow(self) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{each}\n" for each in self.lines[self._written : self._written + _GROWTH]))
        self._written += _GROWTH


class Workers:
    """A Connect cluster of two processes, called by its REST interface."""

    def __init__(self, bootstrap: str, name: str, directory: Path) -> None:
        self._directory = directory
        self._ports = free_ports(2)
        self._processes = {number: ExitStack() for number in range(len(self._ports))}
        self._settings = _settings(bootstrap, name)
        self.output = directory

    def __enter__(self) -> Workers:
        try:
            for number in self._processes:
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for number in self._processes:
            self.kill(number)

    def start(self, number: int) -> None:
        """Start a worker; return once it answers."""
        directory = self._directory / f"worker-{number}"
        directory.mkdir(exist_ok=True)
        listener = {"listeners": f"HTTP://127.0.0.1:{self._ports[number]}"}
        write_properties(directory / "settings", self._settings | listener)
        main_class = "org.apache.kafka.connect.cli.ConnectDistributed"
        arguments = ["-cp", class_path(), main_class, str(directory / "settings")]
        self.output = self._processes[number].enter_context(java(arguments, directory))
        wait(lambda: self.call(number, "GET", "/connectors")[0] == 200, self.output)

    def kill(self, number: int) -> None:
        self._processes[number].close()

    def call(self, number: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        return call(method, f"http://127.0.0.1:{self._ports[number]}{path}", body)

    def insist(self, number: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Call until it works: Connect refuses (409) while it divides its work again. Returns the status."""
        answers: list[int] = []

        def works() -> bool:
            answers.append(self.call(number, method, path, body)[0])
            return answers[-1] in _OK

        wait(works, self.output)
        return str(answers[-1])

    def runs(self, number: int, connector: str) -> bool:
        """Return whether a connector and its task run, as a worker knows it."""
        status, found = self.call(number, "GET", f"/connectors/{connector}/status")
        states = [found["connector"]["state"], *(task["state"] for task in found["tasks"])] if status == 200 else []
        return states == ["RUNNING", "RUNNING"]

    def positions(self, connector: str) -> list[dict[str, Any]] | None:
        """Return how far a connector is, in each partition; None if the worker does not tell."""
        status, found = self.call(1, "GET", f"/connectors/{connector}/offsets")
        return [each["offset"] for each in found["offsets"]] if status == 200 else None

    def worker_of(self, connector: str) -> int:
        """Return the worker that has the task of a connector."""
        _, found = self.call(0, "GET", f"/connectors/{connector}/status")
        return self._ports.index(int(found["tasks"][0]["worker_id"].rpartition(":")[2]))


def run(bootstrap: str, name: str, directory: Path) -> dict[str, str]:
    """Run both connectors on one cluster; return the outcomes by step."""
    topic = f"{name}-lines"
    create(bootstrap, topic, partitions=1)
    source, sink = SourceFile(directory / "source"), directory / "sink"
    configs = {
        "source": {"connector.class": "FileStreamSource", "file": str(source.path), "topic": topic},
        "sink": {"connector.class": "FileStreamSink", "file": str(sink), "topics": topic},
    }
    configs["source"]["exactly.once.support"] = "required"
    outcomes: dict[str, str] = {}
    with Workers(bootstrap, name, directory) as workers:
        for connector, config in configs.items():
            outcomes[f"create the {connector}"] = workers.insist(1, "PUT", f"/connectors/{connector}/config", config)
            wait(lambda each=connector: all(workers.runs(number, each) for number in (0, 1)), workers.output)  # type: ignore[misc]
        wait(_growing(source, sink, LINES // 3), workers.output)
        killed = workers.worker_of("source")
        workers.kill(killed)
        wait(_growing(source, sink, LINES * 2 // 3), workers.output)
        workers.start(killed)
        wait(_growing(source, sink, LINES), workers.output)
        found = [value for _, value in read(bootstrap, topic, LINES)]
        outcomes["carry a file exactly once, a worker killed"] = _compared(found, source.lines)
        written = list(dict.fromkeys(sink.read_text().splitlines()))
        outcomes["write the file, a worker killed"] = "each line" if written == source.lines else f"{len(written)} of {LINES}"
        outcomes |= _positions(workers, bootstrap, topic, source, sink)
        for connector in configs:
            outcomes[f"delete the {connector}"] = workers.insist(0, "DELETE", f"/connectors/{connector}")
        outcomes |= _moved(workers, bootstrap, topic, source, configs["source"])
    return outcomes


def _growing(source: SourceFile, sink: Path, count: int) -> Callable[[], bool]:
    """Return whether ``count`` lines have arrived; until then, the file grows with each question."""

    def have_arrived() -> bool:
        source.grow()
        return sink.exists() and len(set(sink.read_text().splitlines())) >= count

    return have_arrived


def _compared(found: list[str], lines: list[str]) -> str:
    return "each line once, in order" if found == lines else f"{len(found)} lines, {len(set(found))} different ones of {LINES}"


def _positions(workers: Workers, bootstrap: str, topic: str, source: SourceFile, sink: Path) -> dict[str, str]:
    """Read the positions, set the source's back by a line and the sink's to the beginning, and let both run on (KIP-875)."""
    outcomes: dict[str, str] = {}
    at_end = source.path.stat().st_size
    wait(lambda: workers.positions("source") == [{"position": at_end}], workers.output)
    outcomes["ask for the source's position"] = "the end of the file"
    for connector in ("source", "sink"):
        outcomes[f"stop the {connector}"] = workers.insist(1, "PUT", f"/connectors/{connector}/stop")
    outcomes["set the source's position back"] = workers.insist(
        1, "PATCH", "/connectors/source/offsets", source.before_the_last_line()
    )
    outcomes["forget the sink's positions"] = workers.insist(1, "DELETE", "/connectors/sink/offsets")
    outcomes["ask for the sink's positions"] = str(workers.positions("sink"))
    at_begin = {"partition": {"kafka_topic": topic, "kafka_partition": 0}, "offset": {"kafka_offset": 0}}
    outcomes["set the sink's position"] = workers.insist(1, "PATCH", "/connectors/sink/offsets", {"offsets": [at_begin]})
    for connector in ("source", "sink"):
        outcomes[f"resume the {connector}"] = workers.insist(1, "PUT", f"/connectors/{connector}/resume")
    expected = [*source.lines, source.lines[-1]]
    found = [value for _, value in read(bootstrap, topic, len(expected))]
    outcomes["carry the last line again"] = "and no other" if found == expected else f"{len(found)} lines of {len(expected)}"
    wait(lambda: sink.read_text().splitlines()[-len(expected) :] == expected, workers.output)
    outcomes["write the file again"] = "each line, in order"
    return outcomes


def _moved(workers: Workers, bootstrap: str, topic: str, source: SourceFile, config: Mapping[str, str]) -> dict[str, str]:
    """Create a connector that does not run yet, as when Connect moves to another cluster, and let it begin at a position."""
    outcomes = {
        "create a stopped source": workers.insist(
            0, "POST", "/connectors", {"name": "moved", "config": config, "initial_state": "STOPPED"}
        ),
        "set its position": workers.insist(0, "PATCH", "/connectors/moved/offsets", source.before_the_last_line()),
        "resume it": workers.insist(0, "PUT", "/connectors/moved/resume"),
    }
    expected = [*source.lines, source.lines[-1], source.lines[-1]]
    found = [value for _, value in read(bootstrap, topic, len(expected))]
    outcomes["carry the file from there"] = "the last line" if found == expected else f"{len(found)} lines of {len(expected)}"
    return outcomes


def _settings(bootstrap: str, name: str) -> dict[str, str]:
    topics = {
        f"{kind}.storage.{key}": value
        for kind in ("config", "offset", "status")
        for key, value in (("topic", f"{name}-{kind}"), ("replication.factor", "2"))
    }
    return topics | {
        "bootstrap.servers": bootstrap,
        "group.id": name,
        "key.converter": _STRINGS,
        "value.converter": _STRINGS,
        "offset.storage.partitions": "3",
        "status.storage.partitions": "2",
        "offset.flush.interval.ms": "500",
        "exactly.once.source.support": "enabled",
        "consumer.isolation.level": "read_committed",
        "session.timeout.ms": "6000",
        "heartbeat.interval.ms": "1000",
        "scheduled.rebalance.max.delay.ms": "1000",
        "rest.advertised.host.name": "127.0.0.1",
        "plugin.discovery": "service_load",
    }
