"""The offload job: invalid entries are refused with their ledger and entry id; valid ones are offloaded completely."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import UUID

import pytest

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.batches.checkpoint import (
    Checkpoint,
    EpochStart,
    OngoingTransaction,
    ProducerEntry,
    SequencedBatch,
    encode_checkpoint,
)
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.producer_states import BATCHES_REMEMBERED
from stratalog_core.partition_state.replay_state import EPOCHS_MAX
from stratalog_core.partition_state.transactions import ABORT, COMMIT
from stratalog_metadata.records import Fragment, Ledger, LedgerState, Topic
from stratalog_tiering.core.offload_job import OffloadJob, Undecided, offloaded_key
from stratalog_tiering.format.footer import PRODUCERS, parse_producers
from stratalog_tiering.format.segment import AbortedTransaction, parse_footer

Batches = Callable[..., list[bytes]]
TOPIC = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=1)


class Entry(NamedTuple):
    entry_id: int
    payload: memoryview


def ledger(number: int, base: int, end: int, entries: int) -> Ledger:
    return Ledger(
        ledger_id=number, topic_id=TOPIC.topic_id, partition=0, base_offset=base, leader_epoch=0, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b",)),), state=LedgerState.CLOSED, last_entry=entries - 1,
        payload_bytes=1, end_offset=end,
    )  # fmt: skip


def job_for(*ledgers: Ledger, following: Sequence[Ledger] = ()) -> OffloadJob:
    return OffloadJob("c", TOPIC, ledgers, following, key=offloaded_key(TOPIC, ledgers, 7), block_bytes=500)


def numbered(payloads: Sequence[bytes], first: int = 0) -> list[Entry]:
    return [Entry(first + number, memoryview(payload)) for number, payload in enumerate(payloads)]


def checkpoint(offset: int, **fields: object) -> list[bytes]:
    return encode_checkpoint(Checkpoint(offset=offset, **fields), part_bytes_max=3)  # type: ignore[arg-type]


def test_ledgers_read_in_parts_make_one_segment(make_batches: Batches) -> None:
    first, second = [*checkpoint(0), *make_batches(0, [2, 3])], [*checkpoint(5), *make_batches(5, [4])]
    job = job_for(ledger(1, 0, 5, len(first)), ledger(2, 5, 9, len(second)))
    content = bytearray()
    for payloads in (first, second):
        for number in range(len(payloads)):
            wanted = job.next_read
            assert wanted is not None
            assert (wanted.first, wanted.last) == (number, len(payloads) - 1)
            job.add_entries(numbered(payloads[number : number + 1], number))
            content += b"".join(job.take_parts())
    assert job.next_read is None
    content += b"".join(job.finish(9))
    footer = parse_footer(content, len(content))
    assert footer == job.footer
    assert content[: footer.data_bytes] == b"".join(make_batches(0, [2, 3, 4]))
    assert job.entry().object_bytes == len(content)


def test_a_missing_entry_is_refused(make_batches: Batches) -> None:
    job = job_for(ledger(1, 0, 5, 3))
    with pytest.raises(Corrupt, match="ledger 1: entry 1 arrived; expected 0"):
        job.add_entries(numbered(make_batches(0, [5]), first=1))


def test_a_spoiled_batch_is_refused(make_batches: Batches) -> None:
    batch = bytearray(make_batches(0, [5])[0])
    batch[-1] ^= 1
    with pytest.raises(Corrupt, match=r"ledger 1, entry 0: .* does not match its CRC"):
        job_for(ledger(1, 0, 5, 1)).add_entries(numbered([bytes(batch)]))


def test_a_gap_between_batches_is_refused(make_batches: Batches) -> None:
    payloads = [*make_batches(0, [2]), *make_batches(3, [2])]
    with pytest.raises(Corrupt, match=r"ledger 1, entry 1: .* does not continue at 2"):
        job_for(ledger(1, 0, 5, 2)).add_entries(numbered(payloads))


@pytest.mark.parametrize("end", [4, 6])
def test_a_ledger_must_end_where_its_record_says(make_batches: Batches, end: int) -> None:
    with pytest.raises(Corrupt, match="holds offsets up to 5"):
        job_for(ledger(1, 0, end, 1)).add_entries(numbered(make_batches(0, [5])))


def test_a_ledger_may_not_end_within_its_checkpoint() -> None:
    with pytest.raises(Corrupt, match="within its checkpoint"):
        job_for(ledger(1, 0, 0, 1)).add_entries(numbered(checkpoint(0)[:1]))


def test_the_history_of_epochs_is_bounded_and_below_the_end(make_batches: Batches) -> None:
    base = EPOCHS_MAX + 20
    epochs = tuple(EpochStart(epoch, epoch) for epoch in range(base + 1))
    payloads = [*encode_checkpoint(Checkpoint(offset=base, leader_epochs=epochs)), *make_batches(base, [5], epoch=base)]
    job = job_for(ledger(1, base, base + 5, len(payloads)))
    job.add_entries(numbered(payloads))
    job.finish(1)
    found = job.footer.leader_epochs
    assert len(found) == EPOCHS_MAX
    assert found[-1] == EpochStart(base, base)


def transactional(offset: int, producer_id: int, control: int | None = None) -> bytes:
    """A batch of one record in a producer's transaction, or the marker that ends it."""
    key = None if control is None else struct.pack(">hh", 0, control)
    attributes = TRANSACTIONAL_BIT | (CONTROL_BIT if control is not None else 0)
    record = Record(offset=offset, timestamp_ms=1, key=key, value=b"")
    identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": -1 if control is not None else 0}
    return bytes(build_batch([record], attributes=attributes, **identity))


def test_aborted_transactions_of_all_ledgers_are_in_the_footer() -> None:
    first = [*checkpoint(0), transactional(0, 1), transactional(1, 2), transactional(2, 1, ABORT)]
    second = [*checkpoint(3, transactions=(OngoingTransaction(2, 1),)), transactional(3, 3), transactional(4, 2, ABORT)]
    second += [transactional(5, 3, COMMIT), encode_checkpoint(Checkpoint(offset=6))[0]]
    job = job_for(ledger(1, 0, 3, len(first)), ledger(2, 3, 6, len(second)))
    job.add_entries(numbered(first))
    job.add_entries(numbered(second))
    job.finish(1)
    assert job.footer.aborted_transactions == (
        AbortedTransaction(producer_id=1, first_offset=0, last_offset=2, last_stable_offset=1),
        AbortedTransaction(producer_id=2, first_offset=1, last_offset=4, last_stable_offset=3),
    )


def test_transactions_that_end_in_later_ledgers_are_decided_by_them() -> None:
    first = [*checkpoint(0), transactional(0, 1), transactional(1, 2), transactional(2, 1, COMMIT)]
    second = [*checkpoint(3, transactions=(OngoingTransaction(2, 1),)), transactional(3, 3)]
    third = [*checkpoint(4, transactions=(OngoingTransaction(2, 1), OngoingTransaction(3, 3)))]
    third += [transactional(4, 2, ABORT), transactional(5, 3, ABORT)]
    ledgers = [ledger(1, 0, 3, len(first)), ledger(2, 3, 4, len(second)), ledger(3, 4, 6, len(third))]
    job = job_for(ledgers[0], following=ledgers[1:])
    for payloads in (first, second):
        job.add_entries(numbered(payloads))
    wanted = job.next_read
    assert wanted is not None
    assert (wanted.ledger, wanted.first) == (ledgers[2], 0)
    job.add_entries(numbered(third[:-1]))
    assert job.next_read is None, "nothing more is read than the decision takes"
    job.add_entries(numbered(third[-1:], len(third) - 1))
    content = b"".join(job.take_parts())
    *rest, producers, _ = job.finish(1)
    assert job.footer.aborted_transactions == (
        AbortedTransaction(producer_id=2, first_offset=1, last_offset=4, last_stable_offset=3),
    )
    assert (job.footer.end_offset, job.footer.batch_count) == (3, 3)
    assert b"".join([content, *rest]) == b"".join(first[-3:])
    section = job.footer.section(PRODUCERS)
    assert section is not None
    assert {one.producer_id for one in parse_producers(producers, section)} == {1, 2}


def test_a_transaction_that_the_later_ledgers_leave_open_is_not_offloaded() -> None:
    first, second = [*checkpoint(0), transactional(0, 7)], [*checkpoint(1, transactions=(OngoingTransaction(7, 0),))]
    second.append(transactional(1, 7))
    job = job_for(ledger(1, 0, 1, len(first)), following=[ledger(2, 1, 2, len(second))])
    job.add_entries(numbered(first))
    job.add_entries(numbered(second))
    assert job.next_read is None
    with pytest.raises(Undecided, match=r"open since offset 0: .* the segment ends at 1"):
        job.finish(1)


def test_an_undecided_transaction_is_not_offloaded() -> None:
    payloads = [*checkpoint(0), transactional(0, 7)]
    job = job_for(ledger(1, 0, 1, len(payloads)))
    job.add_entries(numbered(payloads))
    with pytest.raises(Undecided, match="producer 7 has a transaction open since offset 0"):
        job.finish(1)


def test_the_footer_keeps_no_more_batches_per_producer_than_an_owner() -> None:
    """The checkpoint may come from a release that keeps more batches."""
    batches = tuple(SequencedBatch(number, number, number, 0) for number in range(7))
    payloads = [*checkpoint(7, producers=(ProducerEntry(1, 0, batches),)), transactional(7, 2), transactional(8, 2, COMMIT)]
    job = job_for(ledger(1, 7, 9, len(payloads)))
    job.add_entries(numbered(payloads))
    job.take_parts()
    stored, _ = job.finish(1)
    section = job.footer.section(PRODUCERS)
    assert section is not None
    assert parse_producers(stored, section)[0] == ProducerEntry(1, 0, batches[-BATCHES_REMEMBERED:])
