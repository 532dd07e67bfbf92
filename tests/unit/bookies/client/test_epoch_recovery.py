"""Recoveries under a higher epoch: one command closes many ledgers, and the old writer can change nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from unit.bookies.client.test_ledger_client import (
    SPEC,
    TOPIC,
    Cluster,
    Recorder,
    batch,
    cluster,
    make_partition,
    no_updates,
    open_writer,
    settled,
)

from stratalog_bookies.client import EntryHead, LedgerClient, LedgerWriter, ledger_recovery
from stratalog_bookies.client.ledger_reads import HEAD_BYTES, LedgerReads
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_core.errors import Conflict, OutcomeUnknown, StaleEpoch
from stratalog_metadata.records import Ledger, LedgerRef, LedgerState, Log, log_key
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Put, Update, VersionIs
from stratalog_metadata.state.guarded_update import Superseded

__all__ = ["cluster"]


class Counting:
    """The quorum's client; records the proposed commands. ``fail_next`` raises OutcomeUnknown after the command took effect."""

    def __init__(self, cluster: Cluster) -> None:
        self.metadata = cluster.metadata
        self.propose_really = cluster.metadata.propose
        self.commands: list[Command] = []
        self.fail_next = False

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        self.commands.append(command)
        applied = await self.propose_really(command, timeout_s)
        if self.fail_next:
            self.fail_next = False
            raise OutcomeUnknown
        return applied


@pytest.fixture
def counting(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(cluster)
    monkeypatch.setattr(cluster.metadata, "propose", counting.propose)
    return counting


async def open_under(cluster: Cluster, client: LedgerClient, count: int) -> list[LedgerWriter]:
    """Writers of epoch 3 with one confirmed batch each."""
    requirement = await make_partition(cluster, 3)
    writers, recorders = list[LedgerWriter](), list[Recorder]()
    for _ in range(count):
        recorder = Recorder()
        writers.append(
            await client.create(SPEC, requirements=(requirement,), updates=no_updates, listener=recorder)
        )  # fmt: skip
        writers[-1].append(batch(100))
        recorders.append(recorder)
    for recorder in recorders:
        await recorder.confirmed(0)
    return writers


async def test_many_ledgers_are_closed_with_one_command_and_nothing_is_read_first(
    cluster: Cluster, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = await open_under(cluster, cluster.client(), 20)
    epoch = await make_partition(cluster, 4)
    counting.commands.clear()
    monkeypatch.setattr(cluster.metadata, "read", None)
    ledger_ids = [writer.ledger.ledger_id for writer in writers]
    found = await cluster.client().recover_reading(ledger_ids, requirements=(epoch,))
    assert [each.ledger.ledger_id for each in found] == ledger_ids
    assert {(each.ledger.state, each.ledger.last_entry, each.ledger.end_offset) for each in found} == {
        (LedgerState.CLOSED, 0, 101)
    }
    assert {(len(each.heads), len(each.entries)) for each in found} == {(1, 1)}
    changed = [update for command in counting.commands for update in command.updates]
    assert len(changed) == 20
    assert {update.record.state for update in changed if isinstance(update, Put) and isinstance(update.record, Ledger)} == {
        LedgerState.CLOSED
    }
    assert len(counting.commands) < 20


async def test_sizes_in_memory_are_bounded_however_many_long_ledgers_are_recovered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All entries of a thousand ledgers were held at once, only to add up their sizes."""
    monkeypatch.setattr(ledger_recovery, "KEPT_HEADS_MAX", 4)
    monkeypatch.setattr(ledger_recovery, "SIZES_AT_ONCE", 3)
    monkeypatch.setattr(ledger_recovery, "SIZE_READS_AT_ONCE", 2)
    writers = await open_under(cluster, cluster.client(), 6)
    for writer in writers:
        for number in range(1, 8):
            writer.append(batch(100 + number))
    await asyncio.gather(*map(settled, writers))
    epoch = await make_partition(cluster, 4)
    held, most_held = 0, 0
    read = LedgerReads.heads

    async def heads(reads: LedgerReads, ledger: Ledger, first: int, last: int, head_bytes: int = HEAD_BYTES) -> list[EntryHead]:
        nonlocal held, most_held
        held += last - first + 1
        most_held = max(most_held, held)
        found = await read(reads, ledger, first, last, head_bytes)
        held -= last - first + 1
        return found

    monkeypatch.setattr(LedgerReads, "heads", heads)
    ledger_ids = [writer.ledger.ledger_id for writer in writers]
    found = await cluster.client().recover_reading(ledger_ids, requirements=(epoch,))
    assert {(each.ledger.last_entry, each.ledger.end_offset, each.ledger.payload_bytes) for each in found} == {
        (7, 108, 8 * len(batch(100)))
    }
    assert [each.heads for each in found] == [[]] * 6
    assert most_held == 2 * 3


async def test_the_old_writer_can_not_change_its_ensemble_though_its_record_is_open(cluster: Cluster) -> None:
    client, recorder = cluster.client(), Recorder()
    old = await make_partition(cluster, 3)
    writer = await client.create(SPEC, requirements=(old,), updates=no_updates, listener=recorder)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await make_partition(cluster, 4)
    await cluster.start_bookie("spare")
    await cluster.stop_bookie(writer.ledger.fragments[-1].bookies[0])
    writer.append(batch(101))
    assert isinstance(await recorder.failed(), StaleEpoch)
    assert (await cluster.stored(writer.ledger.ledger_id)).fragments == writer.ledger.fragments


async def test_under_the_writers_own_epoch_the_record_is_set_to_in_recovery_first(cluster: Cluster, counting: Counting) -> None:
    (writer,) = await open_under(cluster, cluster.client(), 1)
    epoch = await make_partition(cluster, 3)
    counting.commands.clear()
    await cluster.client().recover([writer.ledger.ledger_id], requirements=(epoch,))
    states = [
        update.record.state
        for command in counting.commands
        for update in command.updates
        if isinstance(update, Put) and isinstance(update.record, Ledger)
    ]
    assert states == [LedgerState.IN_RECOVERY, LedgerState.CLOSED]


async def closed_records(cluster: Cluster, count: int) -> list[tuple[Ledger, int]]:
    """Records as a recovery would close them, with the stored versions."""
    client = cluster.client()
    records = []
    for _ in range(count):
        writer, _ = await open_writer(client)
        (found,) = await cluster.metadata.read([writer.ledger.key()])
        assert found is not None
        records.append((msgspec.structs.replace(writer.ledger, state=LedgerState.CLOSED, end_offset=100), found.version))
    return records


async def test_one_that_is_refused_holds_up_none_of_the_others(cluster: Cluster) -> None:
    puts, records = LedgerRecordPuts(cluster.metadata), await closed_records(cluster, 5)
    other = msgspec.structs.replace(records[2][0], end_offset=99)
    await cluster.metadata.propose(Command(updates=(Put(record=other),)))
    outcomes = await asyncio.gather(
        *(puts.put(*each, requirements=(), timeout_s=10.0) for each in records), return_exceptions=True
    )
    assert isinstance(outcomes[2], Superseded)
    assert all(isinstance(outcome, int) for place, outcome in enumerate(outcomes) if place != 2)
    for place, (record, _) in enumerate(records):
        assert await cluster.stored(record.ledger_id) == (other if place == 2 else record)
    await puts.close()


async def test_what_took_effect_without_an_answer_is_not_done_twice(cluster: Cluster, counting: Counting) -> None:
    records = await closed_records(cluster, 5)
    puts = LedgerRecordPuts(cluster.metadata)
    counting.fail_next = True
    versions = await asyncio.gather(*(puts.put(*each, requirements=(), timeout_s=10.0) for each in records))
    assert len(set(versions)) == 1
    for record, version in zip((record for record, _ in records), versions, strict=True):
        (found,) = await cluster.metadata.read([record.key()])
        assert found is not None
        assert (found.version, found.record) == (version, record)
    await puts.close()


async def test_of_two_changes_of_one_record_in_one_turn_one_is_refused(cluster: Cluster) -> None:
    puts, records = LedgerRecordPuts(cluster.metadata), await closed_records(cluster, 3)
    rival = msgspec.structs.replace(records[0][0], end_offset=99)
    outcomes = await asyncio.gather(
        *(puts.put(*each, requirements=(), timeout_s=10.0) for each in [*records, (rival, records[0][1])]),
        return_exceptions=True,
    )
    assert [isinstance(outcome, Superseded) for outcome in outcomes].count(True) == 1
    await puts.close()


async def test_of_two_ledgers_that_enter_the_same_log_in_one_turn_one_is_refused(cluster: Cluster) -> None:
    client, key = cluster.client(), log_key(TOPIC, 0)

    def enter(ledger: Ledger) -> tuple[Update, ...]:
        return (Put(record=Log(topic_id=TOPIC, index=0, ledgers=(reference(ledger),))),)

    outcomes = await asyncio.gather(
        *(
            client.create(SPEC, requirements=(VersionIs(key=key, version=ABSENT),), updates=enter, listener=Recorder())
            for _ in range(2)
        ),
        return_exceptions=True,
    )
    (opened,) = [outcome for outcome in outcomes if isinstance(outcome, LedgerWriter)]
    assert [type(outcome) for outcome in outcomes if outcome is not opened] == [Conflict]
    log = cluster.metadata.view.find(Log, key)
    assert log is not None
    assert log.ledgers == (reference(opened.ledger),)
    assert [ledger.ledger_id for ledger in cluster.metadata.view.all(Ledger)] == [opened.ledger.ledger_id]


def reference(ledger: Ledger) -> LedgerRef:
    return LedgerRef(ledger_id=ledger.ledger_id, base_offset=100, leader_epoch=3)


async def test_ledgers_that_are_opened_in_one_turn_share_a_command(cluster: Cluster, counting: Counting) -> None:
    client = cluster.client()
    await asyncio.gather(*(open_writer(client) for _ in range(50)))
    opening = [command for command in counting.commands if any(isinstance(update, Put) for update in command.updates)]
    assert sum(len(command.updates) for command in opening) == 50
    assert len(opening) <= 5
