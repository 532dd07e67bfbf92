"""``stratalog produce`` and ``consume``: what they cannot do as asked is refused with one line, and nothing is ignored."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_all_served
from unit.broker.raw_client import produce
from unit.pipeline.malformed_headers import with_malformed_header_name

from stratalog.app import stratalog
from stratalog_core.errors import Corrupt, Invalid, NotFound, StratalogError

LARGE = "9" * 20


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, brokers=1) as made:
        yield made


async def test_what_cannot_be_done_is_refused(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def run(command: str, *words: str, stdin: str = "") -> Result:
        return CliRunner().invoke(stratalog, [command, "events", *words, "--bootstrap", bootstrap], input=stdin)

    def refused(error: type[StratalogError], text: str, command: str, *words: str, stdin: str = "") -> None:
        done = run(command, *words, stdin=stdin)
        assert isinstance(done.exception, error), (words, done.output, done.exception)
        assert text in done.exception.message

    def misused(text: str, command: str, *words: str) -> None:
        done = run(command, *words)
        assert done.exit_code == 2, done.output
        assert text in done.stderr

    def steps() -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("events", 2, 1)])["events"].result(60)
        refused(Invalid, "max.message.bytes", "produce", stdin="x" * 2_000_000)
        refused(NotFound, "no partition 99; it has 2", "produce", "--value", "v", "--partition", "99")
        refused(Invalid, "is not a time", "produce", "--value", "v", "--timestamp", LARGE)
        refused(Invalid, "minimum is 1970-01-01T00:00:00.001Z", "produce", "--value", "v", "--timestamp", "1970-01-01")
        refused(Invalid, "--key-separator", "produce", "--key", "k", "--key-separator", ":", stdin="a:b\n")
        refused(Invalid, "--key-separator", "produce", "--value", "a:b", "--key-separator", ":")
        assert run("produce", "--value", "first", "--partition", "0", "--timestamp", "1970-01-01T00:00:01Z").exit_code == 0
        refused(NotFound, "no partition 99", "consume", "--partition", "99")
        misused("--partition", "consume", "--partition=-3")
        refused(Invalid, "maximum", "consume", "--partition", "0", "--offset", LARGE)
        refused(Invalid, "is not a time", "consume", "--time", LARGE)
        refused(Invalid, "--time", "consume", "--offset", "latest", "--time", "1000")
        refused(Invalid, "--group", "consume", "--group", "g", "--offset", "5")
        assert run("consume", "--time", "0").stdout == "first\n"
        refused(Invalid, "'-1' is not a time", "consume", "--time=-1")
        for number in range(4):
            assert run("produce", "--value", f"{number}", "--partition", "0").exit_code == 0
        assert run("consume", "--partition", "0", "--offset", "-2").stdout == "2\n3\n"
        assert run("consume", "--partition", "0", "--offset", "-99").stdout == "first\n0\n1\n2\n3\n"
        raised = ConfigEntry("max.message.bytes", "3000000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, "events", incremental_configs=[raised])
        admin.incremental_alter_configs([resource])[resource].result(60)
        assert run("produce", "--partition", "1", stdin="x" * 2_000_000).exit_code == 0, "the topic's limit decides"

    await in_thread(steps)


async def test_a_header_name_that_the_client_cannot_read_is_refused_where_headers_are_shown(cluster: MiniCluster) -> None:
    def create() -> None:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic("events", 1, 1)])["events"].result(60)

    def steps() -> None:
        assert CliRunner().invoke(stratalog, ["consume", "events", "--bootstrap", cluster.bootstrap]).stdout == "odd\n"
        for shown in ("--headers", "--json"):
            done = CliRunner().invoke(stratalog, ["consume", "events", shown, "--bootstrap", cluster.bootstrap])
            assert isinstance(done.exception, Corrupt)
            assert done.exception.message.startswith("events-0, offset 0: the name of a header is not UTF-8")

    await in_thread(create)
    await until_all_served(cluster)
    await produce(await cluster.connect(), "events", with_malformed_header_name())
    await in_thread(steps)


async def test_the_end_is_that_of_the_partitions_that_the_group_assigns(cluster: MiniCluster) -> None:
    """Another member reads the other partition, whose end is never reported here."""
    bootstrap, is_over = cluster.bootstrap, threading.Event()
    common = {"bootstrap.servers": bootstrap, "group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}

    def run(*words: str) -> Result:
        done = CliRunner().invoke(stratalog, [*words, "--bootstrap", bootstrap])
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    def consume_beside(member: Consumer) -> None:
        while not is_over.is_set():
            member.poll(0.1)

    def steps() -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("events", 2, 1)])["events"].result(60)
        for partition in ("0", "1"):
            run("produce", "events", "--value", f"of {partition}", "--partition", partition)
        member = Consumer(common)
        member.subscribe(["events"])
        while not member.assignment():
            member.poll(0.1)
        beside = threading.Thread(target=consume_beside, args=[member])
        beside.start()
        try:
            done = run("consume", "events", "--group", "g")
        finally:
            is_over.set()
            beside.join()
            member.close()
        assert done.stdout in ("of 0\n", "of 1\n")
        assert "other members of group g read 1 of 2 partitions" in done.stderr
        rest = run("consume", "events", "--group", "g")
        assert {done.stdout, rest.stdout} == {"of 0\n", "of 1\n"}, "the position was committed"

    await in_thread(steps)
