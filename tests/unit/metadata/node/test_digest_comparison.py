"""Nodes whose states differ are detected, and the one that a majority contradicts stops."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.errors import Corrupt, OutcomeUnknown, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.node import digest_comparison as comparing
from stratalog_metadata.node.digest_comparison import Comparison, Verdict, compare
from stratalog_metadata.raft import Entry, EntryKind
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import Command, Delete, Put, Update
from stratalog_metadata.state.digest import MARK_EVERY, MARKS_KEPT, digest_of, digest_records, hash_record
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage.state_store import EMPTY, row_checksum

TIMEOUT_S = 60
NAMES = st.sampled_from("abcd")
UPDATES = st.one_of(
    st.builds(lambda name, value: Put(record=DynamicConfig(resource=name, configs={"v": value})), NAMES, st.text(max_size=2)),
    st.builds(lambda name: Delete(key=f"dynamic_config/{name}"), NAMES),
)


def commit(replica: Replica, *updates: Update) -> None:
    payload = msgspec.msgpack.encode(Command(updates=updates))
    replica.apply(Entry(replica.index + 1, 1, EntryKind.COMMAND, payload))


@given(commands=st.lists(st.lists(UPDATES, min_size=1, max_size=4), max_size=30))
def test_the_running_digest_is_that_of_the_records(commands: list[list[Update]]) -> None:
    replica = Replica(EMPTY)
    for updates in commands:
        commit(replica, *updates)
        assert replica.digest.value == digest_records(replica.records)
    again = Replica(replica.image())
    assert again.digest.value == replica.digest.value
    again.restore(EMPTY)
    assert again.digest.value == digest_records(()) == bytes(16)


@given(
    names=st.lists(NAMES, min_size=2, max_size=4, unique=True),
    changed=st.integers(0, 3),
    what=st.sampled_from(["missing", "old", "other"]),
)
def test_states_that_differ_in_a_record_have_different_digests(names: list[str], changed: int, what: str) -> None:
    replica = Replica(EMPTY)
    for name in names:
        commit(replica, Put(record=DynamicConfig(resource=name)))
    whole = list(replica.records)
    altered = whole.pop(changed % len(whole))
    if what == "old":
        whole.append(msgspec.structs.replace(altered, version=altered.version + 1))
    elif what == "other":
        whole.append(msgspec.structs.replace(altered, record=DynamicConfig(resource=altered.record.key(), configs={"a": "b"})))
    assert digest_records(whole) != replica.digest.value


def test_marks_are_kept_at_the_same_entries_everywhere_and_bounded() -> None:
    replica = Replica(EMPTY)
    for number in range((MARKS_KEPT + 2) * MARK_EVERY):
        commit(replica, Put(record=DynamicConfig(resource=str(number % 7))))
    last = replica.index // MARK_EVERY
    assert list(replica.digest.marks) == [number * MARK_EVERY for number in range(last - MARKS_KEPT + 1, last + 1)]


A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize(
    ("own", "others", "voters", "expected"),
    [
        ({64: A}, [{64: A}, {64: A}], 3, Comparison(Verdict.AGREES)),
        ({64: A}, [{64: B}, {64: B}], 3, Comparison(Verdict.OUTVOTED, 64)),
        ({64: A}, [{64: A}, {64: B}], 3, Comparison(Verdict.AGREES)),
        ({64: A}, [{64: B}], 3, Comparison(Verdict.UNDECIDED, 64)),
        ({64: A}, [{64: B}], 2, Comparison(Verdict.UNDECIDED, 64)),
        ({64: A, 128: A}, [{64: A, 128: B}, {128: B}], 3, Comparison(Verdict.OUTVOTED, 128)),
        ({64: A}, [{128: B}, {128: B}], 3, Comparison(Verdict.AGREES)),
        ({64: A}, [{64: B}, {64: B}], 5, Comparison(Verdict.UNDECIDED, 64)),
        ({64: A}, [{64: B}, {64: B}, {64: B}], 5, Comparison(Verdict.OUTVOTED, 64)),
        ({}, [{64: B}, {64: B}], 3, Comparison(Verdict.AGREES)),
        ({64: A}, [], 1, Comparison(Verdict.AGREES)),
    ],
)
def test_a_majority_decides(own: dict[int, bytes], others: list[dict[int, bytes]], voters: int, expected: Comparison) -> None:
    assert compare(own, others, voters) == expected


@pytest.fixture
async def transport(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TcpTransport]:
    monkeypatch.setattr(comparing, "COMPARE_INTERVAL_S", 0.05)
    transport = TcpTransport()
    yield transport
    await transport.close()


async def put_many(quorum: EmbeddedQuorum, count: int) -> None:
    for number in range(count):
        await put_one(quorum, f"topic-{number % 9}")


async def put_one(quorum: EmbeddedQuorum, name: str) -> None:
    """Repeat it, which is harmless, if the outcome is unknown: after the end of a leader, or after a stall of the machine."""
    while True:
        with suppress(OutcomeUnknown, Unavailable):
            await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource=name)),)))
            return


def forge(path: Path) -> None:
    """Change a record in a stopped node's state so that its checksum and the digest fit: no check of its own can see it."""
    record = msgspec.msgpack.encode(DynamicConfig(resource="topic-1", configs={"forged": "yes"}))
    with closing(sqlite3.connect(path)) as connection, connection:
        ((version,),) = connection.execute("SELECT version FROM records WHERE key = 'dynamic_config/topic-1'").fetchall()
        checksum = row_checksum("dynamic_config/topic-1", version, record)
        connection.execute("UPDATE records SET record = ?, checksum = ? WHERE key LIKE '%/topic-1'", (record, checksum))
        rows = connection.execute("SELECT key, version, record FROM records").fetchall()
        connection.execute("UPDATE applied SET digest = ?", (digest_of(hash_record(*row) for row in rows),))


@pytest.mark.parametrize("victim", [1, 2, 3])
async def test_a_node_whose_state_differs_stops_and_the_others_serve_on(
    tmp_path: Path, transport: TcpTransport, victim: int
) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3) as quorum:
        await put_many(quorum, 9)
        server = quorum.servers[victim - 1]
        await server.close()
        forge(tmp_path / str(victim) / "state.sqlite")
        server = await quorum.restart(victim)
        async with asyncio.timeout(TIMEOUT_S):
            number = 0
            # The forged record itself is not written again: only a comparison of the whole state can see it.
            while server.failure is None:
                await put_one(quorum, f"other-{number % 9}")
                number += 1
        assert isinstance(server.failure, Corrupt)
        assert "differs from a majority's" in server.failure.message
        assert "metadata remove" in server.failure.message
        await put_many(quorum, 3)
        assert [other.failure for other in quorum.servers if other is not server] == [None, None]


async def test_nodes_agree_after_snapshots_and_restarts(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3, snapshot_entries=100, kept_entries=10) as quorum:
        for victim in (1, 2, 3):
            await quorum.servers[victim - 1].close()
            await put_many(quorum, 3 * MARK_EVERY)
            await quorum.restart(victim)
            await put_many(quorum, MARK_EVERY)
        comparers = [serving.comparer for server in quorum.servers if (serving := server._serving) is not None]
        assert len(comparers) == 3
        last = quorum.client.view.index // MARK_EVERY * MARK_EVERY
        async with asyncio.timeout(TIMEOUT_S):
            # A node that installed a snapshot after the entry at ``last`` has no mark until there are more entries.
            while not any(index >= last for index in set.intersection(*(set(dict(each.answer().marks)) for each in comparers))):
                await put_one(quorum, "topic-1")
        for each in comparers:
            assert await each.compare_once() == Comparison(Verdict.AGREES)
        assert [server.failure for server in quorum.servers] == [None] * 3
