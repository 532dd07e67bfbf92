"""Guards of transactions that are being verified, against all that may happen before the coordinator answers."""

from __future__ import annotations

from unit.broker.transactional import transactional

from stratalog_broker.partitions.appended_transactions import AppendedTransactions
from stratalog_core.batches.batch import BatchHeader, read_header
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker


def sent(producer_id: int, sequence: int, epoch: int = 0) -> BatchHeader:
    return read_header(transactional(producer_id, sequence, b"v", epoch=epoch))


def test_the_first_batch_and_any_marker_make_an_answer_stale() -> None:
    transactions = AppendedTransactions({}, 10)
    guard = transactions.guard(sent(1, 0))
    assert transactions.is_standing(1, guard)
    transactions.appended(sent(2, 0), 100, b"")
    assert transactions.is_standing(1, guard), "another producer's batch"
    marker = build_marker(ABORT, 1, 0, 0, 0)
    transactions.appended(read_header(marker), 101, marker)
    assert not transactions.is_standing(1, guard)
    following = transactions.guard(sent(1, 0))
    transactions.appended(sent(1, 0), 102, b"")
    assert not transactions.is_standing(1, following)
    assert transactions.first_offsets == {2: 100, 1: 102}


def test_a_transaction_lasts_from_its_first_batch_to_its_marker() -> None:
    transactions = AppendedTransactions({7: 50}, 10)
    transactions.appended(sent(7, 4), 60, b"")
    assert transactions.first_offsets == {7: 50}
    marker = build_marker(COMMIT, 7, 0, 0, 0)
    transactions.appended(read_header(marker), 61, marker)
    assert transactions.first_offsets == {}


def test_batches_that_wait_share_a_guard_that_knows_the_lowest_sequence() -> None:
    transactions = AppendedTransactions({}, 10)
    guard = transactions.guard(sent(1, 5))
    assert transactions.guard(sent(1, 2)) is guard
    assert transactions.guard(sent(1, 8)) is guard
    assert guard.lowest_sequence == 2
    newer = transactions.guard(sent(1, 3, epoch=1))
    assert newer is not guard
    assert (newer.epoch, newer.lowest_sequence) == (1, 3)
    assert transactions.guard(sent(1, 0)) is newer, "an older epoch's batch changes nothing"
    assert newer.lowest_sequence == 3


def test_guards_are_bounded() -> None:
    transactions = AppendedTransactions({}, 2)
    first, *_ = [transactions.guard(sent(producer_id, 0)) for producer_id in (1, 2, 3)]
    assert not transactions.is_standing(1, first)
    assert transactions.is_standing(3, transactions.guard(sent(3, 0)))
