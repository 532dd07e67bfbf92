"""Shorter retention: what it deletes is counted as the workers do, and nothing is changed without a confirmation."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import click
import pytest
from support.archive_writer import ArchiveWriter
from support.embedded_quorum import EmbeddedQuorum

from stratalog.deletion import confirm
from stratalog.topic_retention import (
    Expiring,
    RetentionChange,
    change_of,
    changes_by_defaults,
    confirm_compaction,
    confirm_shortening,
    expiring_by,
    shortening_text,
)
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Fragment, Ledger, LedgerRef, LedgerState, Log, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.store import ObjectStore, open_store

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=1, replication_factor=1, configs={"retention.ms": "-1"})
NOW_MS = 10_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    background = ThreadBackground(2, "test")
    yield open_store(str(tmp_path / "store"), background=background, clock=SystemClock(), random=random.Random(1))
    background.close()


@pytest.fixture
async def history(quorum: EmbeddedQuorum, store: ObjectStore) -> int:
    """Four segments of ten records, of times 1000, 2000, 3000 and 4000, and a sealed ledger of five; a segment's bytes."""
    writer = ArchiveWriter(store, TOPIC, SystemClock(), random.Random(2))
    for number in range(4):
        batch = build_batch(
            [Record(offset=10 * number + i, timestamp_ms=1000 * (number + 1), key=b"k", value=b"v") for i in range(10)]
        )
        pointer, entry = await writer.append(0, [batch])
    refs = tuple(LedgerRef(ledger_id=number, base_offset=offset, leader_epoch=1) for number, offset in ((1, 40), (2, 45)))
    ledger = Ledger(
        ledger_id=1, topic_id=TOPIC.topic_id, partition=0, base_offset=40, leader_epoch=1, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b",)),), state=LedgerState.CLOSED, payload_bytes=70, end_offset=45,
        closed_at_ms=5000,
    )  # fmt: skip
    newest = Ledger(
        ledger_id=2, topic_id=TOPIC.topic_id, partition=0, base_offset=45, leader_epoch=1, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b",)),),
    )  # fmt: skip
    records = (TOPIC, Log(topic_id=TOPIC.topic_id, index=0, ledgers=refs), ledger, newest, pointer)
    await quorum.client.propose(Command(updates=tuple(Put(record=record) for record in records)))
    return entry.stored_bytes


def shorter(**after: int) -> RetentionChange:
    configs = {name.replace("_", "."): str(value) for name, value in after.items()}
    (change,) = change_of("flights", TOPIC.configs, {**TOPIC.configs, **configs})
    return change


async def test_exactly_what_the_change_deletes_is_counted(quorum: EmbeddedQuorum, store: ObjectStore, history: int) -> None:
    async def expiring(change: RetentionChange) -> Expiring:
        return await expiring_by(quorum.client.view, store, TOPIC, change, NOW_MS)

    assert await expiring(shorter(retention_ms=9500)) == Expiring(topic="flights", oldest_kept_ms=1000)
    two = Expiring(topic="flights", cold_records=20, cold_bytes=2 * history, oldest_kept_ms=3000)
    assert await expiring(shorter(retention_ms=7500)) == two
    assert await expiring(shorter(retention_bytes=2 * history + 70)) == two
    (later,) = change_of("flights", {"retention.ms": "8500"}, {"retention.ms": "7500"})
    assert (await expiring(later)).cold_records == 10, "the first segment expires anyway"
    everything = await expiring(shorter(retention_ms=100))
    assert (everything.cold_records, everything.hot_records, everything.hot_bytes) == (40, 5, 70)
    assert everything.oldest_kept_ms is None


async def test_defaults_shorten_the_topics_that_follow_them(quorum: EmbeddedQuorum) -> None:
    follows = Topic(name="follows", topic_id=UUID(int=8), partition_count=1, replication_factor=1)
    await quorum.client.propose(Command(updates=(Put(record=TOPIC), Put(record=follows))))
    assert changes_by_defaults(quorum.client.view, {"retention.ms": "-1"}) == []
    changes = changes_by_defaults(quorum.client.view, {"retention.ms": "5"})
    assert [(change.topic, change.shortened[0].after) for change in changes] == [("follows", 5)]


def test_the_question_names_limits_and_counts() -> None:
    count = Expiring(topic="flights", cold_records=20, cold_bytes=2048, hot_records=5, hot_bytes=70, oldest_kept_ms=3000)
    assert shortening_text([shorter(retention_ms=7500)], [count]) == (
        "flights: retention.ms from unlimited to 7500. 20 records (2.0 KiB) of flights in the store and 5 records (70 B) on"
        " bookies expire at once; the oldest record kept there is of 1970-01-01T00:00:03.000Z."
    )


def test_without_a_terminal_only_yes_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> tuple[list[str], str]:
        raise Unavailable("the nodes are away")

    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(Invalid, match=r"unknown: the nodes are away.*give --yes"):
            confirm_shortening([shorter(retention_ms=5)], away, yes=False)
        assert confirm_shortening([shorter(retention_ms=5)], away, yes=True) == []
        assert confirm_shortening([], away, yes=False) == []


@pytest.mark.parametrize("answer", ["y", "n"])
def test_on_a_terminal_the_answer_decides(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    person, terminal = os.openpty()
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(person, f"{answer}\n".encode())
        if answer == "y":
            confirm("Sure?", yes=False)
        else:
            with pytest.raises(click.Abort):
                confirm("Sure?", yes=False)
    os.close(person)


@pytest.mark.parametrize(
    ("before", "after", "asks"),
    [
        ({}, {"cleanup.policy": "compact"}, True),
        ({"cleanup.policy": "delete"}, {"cleanup.policy": "delete,compact"}, True),
        ({"cleanup.policy": "compact"}, {"cleanup.policy": "compact,delete"}, False),
        ({"cleanup.policy": "compact"}, {"cleanup.policy": "delete"}, False),
        ({}, {}, False),
    ],
)
def test_a_topic_becomes_a_compacted_one_after_a_question_only(
    before: dict[str, str], after: dict[str, str], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        confirm_compaction("t", before, after, yes=True)
        if asks:
            with pytest.raises(Invalid, match=r"keeps the newest record of each key only.*give --yes to confirm"):
                confirm_compaction("t", before, after, yes=False)
        else:
            confirm_compaction("t", before, after, yes=False)


def test_the_end_of_compaction_alone_shortens_retention() -> None:
    (change,) = change_of("t", {"cleanup.policy": "compact"}, {"cleanup.policy": "delete", "retention.ms": "5"})
    assert [(each.config, each.before, each.after) for each in change.shortened] == [("retention.ms", -1, 5)]
