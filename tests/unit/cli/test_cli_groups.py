"""``stratalog group``, and ``consume`` as a member of a group: what is reported as done is done, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

from stratalog import kafka
from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode
from stratalog_core.errors import Conflict, Invalid, NotFound

RECORDS = 1000


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, brokers=1) as made:
        yield made


class Commands:
    """Runs commands against one cluster."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def run(self, *words: str, stdin: str = "") -> str:
        """Return what the command prints. Raises as it does."""
        done = CliRunner().invoke(stratalog, [*words, "--bootstrap", self.bootstrap], input=stdin)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    def topic(self, name: str, stdin: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
        self.run("produce", name, stdin=stdin)

    def described(self, group: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("group", "describe", group, "--json"))
        return found

    def committed(self, group: str) -> int:
        (row,) = self.described(group)["offsets"]
        return int(row["committed_offset"])


async def test_a_group_is_described_although_one_of_its_topics_is_deleted(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        for name in ("kept", "gone"):
            commands.topic(name, "1\n2\n")
            commands.run("consume", name, "--group", "g")
        commands.run("topic", "delete", "gone", "--yes")
        rows = {row["topic"]: (row["committed_offset"], row["lag"]) for row in commands.described("g")["offsets"]}
        assert rows == {"kept": (2, 0), "gone": (2, None)}

    await in_thread(steps)


async def test_each_group_is_deleted_and_each_failure_named(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "1\n")
        for group in ("first", "last"):
            commands.run("consume", "events", "--group", group)
        with pytest.raises(NotFound) as failure:
            commands.run("group", "delete", "first", "none", "no", "last", "--yes")
        see = "see `stratalog group list`"
        assert failure.value.message == f"no group 'none': {see}; no group 'no': {see}; deleted first, last"
        assert json.loads(commands.run("group", "list", "--json")) == {"groups": []}

    await in_thread(steps)


async def test_the_offsets_of_a_group_with_members_are_not_reset(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "1\n2\n3\n")
        commands.run("consume", "events", "--group", "g")
        member = Consumer({"bootstrap.servers": commands.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"})
        try:
            member.subscribe(["events"])
            while not member.assignment():
                member.poll(0.1)
            commands.topic("new", "1\n")
            member.subscribe(["new"])
            while [place.topic for place in member.assignment()] != ["new"]:
                member.poll(0.1)
            rows = {row["topic"]: (row["committed_offset"], row["lag"]) for row in commands.described("g")["offsets"]}
            assert rows == {"events": (3, 0), "new": (None, None)}, "an assigned partition is shown before its first commit"
            with pytest.raises(Conflict):
                commands.run("group", "reset", "g", "events", "--to", "earliest", "--yes")
        finally:
            member.close()
        assert commands.committed("g") == 3
        with pytest.raises(NotFound, match="topic 'events' has no partition 7; it has 1"):
            commands.run("group", "reset", "g", "events", "--to", "earliest", "--yes", "--partition", "7")

    await in_thread(steps)


async def test_an_offset_past_the_end_is_refused(cluster: MiniCluster) -> None:
    """The client would begin with the oldest record."""
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "1\n2\n3\n")
        with pytest.raises(Invalid, match="--offset is 4; events-0 ends at offset 3"):
            commands.run("consume", "events", "--partition", "0", "--offset", "4")
        assert commands.run("consume", "events", "--partition", "0", "--offset", "3") == ""
        assert commands.run("consume", "events", "--partition", "0", "--offset", "2") == "3\n"

    await in_thread(steps)


async def test_what_a_closed_pipe_did_not_take_is_not_committed(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "".join(f"{number:01000d}\n" for number in range(RECORDS)))
        command = f"'{sys.executable}' -m stratalog consume events --group g --bootstrap {commands.bootstrap} | head -1"
        subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=120)
        assert 1 <= commands.committed("g") < RECORDS // 2, "a pipe takes 64 KiB"

    await in_thread(steps)


async def test_a_member_that_is_terminated_commits_and_leaves(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "".join(f"{number}\n" for number in range(RECORDS)))
        words = ["consume", "events", "--group", "g", "--follow", "--bootstrap", commands.bootstrap]
        with subprocess.Popen([sys.executable, "-m", "stratalog", *words], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                for _ in range(RECORDS):
                    process.stdout.readline()
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == ExitCode.TERMINATED
            finally:
                process.kill()
        assert commands.committed("g") in (RECORDS - 1, RECORDS), "the signal may come before the last record counts as printed"
        assert commands.described("g")["members"] == []

    await in_thread(steps)


async def test_a_change_that_was_made_before_a_failure_is_named(cluster: MiniCluster) -> None:
    commands = Commands(cluster.bootstrap)

    def steps() -> None:
        commands.topic("events", "1\n")
        words = ["topic", "alter", "events", "--metadata", ",".join(cluster.addresses), "--replication-factor", "1"]
        with pytest.raises(Invalid) as failure:
            commands.run(*words, "--partitions", "1")
        assert failure.value.message.endswith("; the replication factor is already changed to 1")

    await in_thread(steps)


async def test_a_topic_is_described_from_one_answer(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be deleted between two."""
    commands = Commands(cluster.bootstrap)

    class OneAnswer(AdminClient):
        def list_topics(self, *given: Any, **named: Any) -> Any:
            found = super().list_topics(*given, **named)
            if hasattr(self, "answered"):
                found.topics.clear()
            self.answered = True
            return found

    def steps() -> None:
        commands.topic("events", "1\n")
        monkeypatch.setattr(kafka, "AdminClient", OneAnswer)
        described = json.loads(commands.run("topic", "describe", "events", "--json"))
        assert (UUID(described["topic_id"]).version, described["replication_factor"]) == (4, 1)
        (row,) = described["partitions"]
        assert (row["partition"], row["latest_offset"]) == (0, 1)

    await in_thread(steps)
