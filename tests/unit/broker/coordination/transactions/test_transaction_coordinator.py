"""Which transitions of a transactional id are allowed: Kafka's rules, case by case, and a model of one producer."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode as E

from stratalog_broker.coordination.transactions.core.coordinator import (
    PARTITIONS_MAX,
    Planned,
    ProducerEpoch,
    TransactionCoordinator,
    TransactionLimits,
)
from stratalog_broker.coordination.transactions.core.records import record_of
from stratalog_broker.coordination.transactions.core.store import TransactionStore, restore_transactional_ids
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_MAX, Transaction, TransactionState
from stratalog_broker.coordination.wake_times import Instant

S = TransactionState
ID = "copier"
A, B = ("a", 0), ("b", 1)
TIMEOUT_MS = 60_000


class Shell:
    """Writes what is planned at once, unless a test asks otherwise."""

    def __init__(self, store: TransactionStore | None = None, now_ms: int = 1_000, version: int = 0, **limits: Any) -> None:
        self.limits = TransactionLimits(**limits)
        self.store = store or TransactionStore()
        self.now_ms = now_ms
        self.spare_ids: list[int] = []
        self.core = TransactionCoordinator(
            self.limits, self.store, self.now, lambda: version, lambda: self.spare_ids.pop() if self.spare_ids else None
        )
        self.unused_id = 100

    @property
    def now(self) -> Instant:
        return Instant(monotonic_ms=self.now_ms, wall_ms=1_000_000 + self.now_ms)

    @property
    def known(self) -> Transaction:
        return self.store.transactions[ID]

    def write(self, planned: Planned, *, fails: bool = False) -> E:
        if not isinstance(planned, Transaction):
            return planned
        if not fails:
            record = record_of(planned)
            self.store.begin_batch()(record.key, record.value, record.headers)
        self.core.settled(planned.transactional_id, self.now)
        self.core.validate_state()
        return E.none

    def init(self, expected: ProducerEpoch | None = None, timeout_ms: int = TIMEOUT_MS) -> ProducerEpoch | E:
        self.unused_id += 1
        planned = self.core.init_producer_id(ID, timeout_ms, expected, self.unused_id, self.now)
        error = self.write(planned)
        if error is not E.none:
            return error
        return E.concurrent_transactions if self.known.state is S.PREPARE_ABORT else self.producer

    @property
    def producer(self) -> ProducerEpoch:
        return ProducerEpoch(self.known.producer_id, self.known.producer_epoch)

    def add(self, *names: tuple[str, int], producer: ProducerEpoch | None = None, version: int = 0) -> E:
        return self.write(
            self.core.add_partitions(ID, producer or self.producer, frozenset(names), frozenset(), version, self.now)
        )

    def end(self, *, commit: bool, producer: ProducerEpoch | None = None, version: int = 0) -> E:
        self.unused_id += 1
        return self.write(
            self.core.end(
                ID, producer or self.producer, commit=commit, client_version=version, unused_id=self.unused_id, now=self.now
            )
        )

    def complete(self) -> None:
        planned = self.core.complete(ID, self.now)
        assert planned is not None
        assert self.write(planned) is E.none


def begun(**limits: Any) -> Shell:
    shell = Shell(**limits)
    assert shell.init() == ProducerEpoch(101, 0)
    return shell


def test_a_transaction_from_the_first_partition_to_the_last_marker() -> None:
    shell = begun()
    assert shell.add(A) is E.none
    assert shell.known.started_at_ms == shell.now.wall_ms
    assert shell.add(A, B) is E.none
    assert (shell.known.state, shell.known.partitions) == (S.ONGOING, (A, B))
    assert shell.end(commit=True) is E.none
    assert shell.known.state is S.PREPARE_COMMIT
    assert shell.add(A) is E.concurrent_transactions
    assert shell.end(commit=True) is E.concurrent_transactions
    assert shell.end(commit=False) is E.concurrent_transactions, "the markers are being written"
    assert shell.init() is E.concurrent_transactions
    shell.complete()
    assert (shell.known.state, shell.known.partitions) == (S.COMPLETE_COMMIT, ())
    assert shell.end(commit=True) is E.none, "a retry of a client that did not get the answer"
    assert shell.end(commit=False) is E.invalid_txn_state
    assert shell.core.complete(ID, shell.now) is None
    assert shell.add(B) is E.none
    assert shell.known.partitions == (B,), "partitions of earlier transactions are forgotten"


def test_partitions_that_the_transaction_has_need_no_record() -> None:
    shell = begun()
    assert shell.add(A, B) is E.none
    assert shell.core.add_partitions(ID, shell.producer, frozenset((A,)), frozenset(), 0, shell.now) is E.none


def test_only_one_write_of_an_id_is_under_way() -> None:
    shell = begun()
    planned = shell.core.add_partitions(ID, shell.producer, frozenset((A,)), frozenset(), 0, shell.now)
    assert isinstance(planned, Transaction)
    assert shell.add(B) is E.concurrent_transactions
    assert shell.end(commit=True) is E.concurrent_transactions
    assert shell.init() is E.concurrent_transactions
    shell.write(planned)
    assert shell.add(B) is E.none


def test_a_write_that_fails_changes_nothing() -> None:
    shell = begun()
    shell.write(shell.core.add_partitions(ID, shell.producer, frozenset((A,)), frozenset(), 0, shell.now), fails=True)
    assert shell.known.state is S.EMPTY
    assert shell.end(commit=True) is E.invalid_txn_state
    assert shell.add(A) is E.none


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_without_a_transaction_is_refused(commit: bool) -> None:
    shell = begun()
    assert shell.end(commit=commit) is E.invalid_txn_state


def test_a_producer_that_is_not_the_present_one_is_refused() -> None:
    shell = begun()
    old, other = shell.producer, ProducerEpoch(55, 0)
    assert shell.init() == ProducerEpoch(101, 1)
    for producer, error in ((old, E.producer_fenced), (other, E.invalid_producer_id_mapping)):
        assert shell.add(A, producer=producer) is error
        assert shell.end(commit=True, producer=producer) is error
        assert shell.core.verify(ID, producer) is error
    assert Shell().core.verify(ID, other) is E.invalid_producer_id_mapping
    assert Shell().add(A, producer=other) is E.invalid_producer_id_mapping
    assert Shell().end(commit=True, producer=other) is E.invalid_producer_id_mapping


# -- InitProducerId


def test_a_new_producer_aborts_the_transaction_of_the_one_before_it_and_fences_it() -> None:
    shell = begun()
    old = shell.producer
    shell.add(A)
    assert shell.init() is E.concurrent_transactions
    assert (shell.known.state, shell.known.producer_epoch, shell.known.partitions) == (S.PREPARE_ABORT, 1, (A,))
    assert shell.end(commit=True, producer=old) is E.producer_fenced
    assert shell.init() is E.concurrent_transactions
    shell.complete()
    assert shell.init() == ProducerEpoch(101, 2), "the epoch of the abort is given to nobody"


def test_an_abort_that_could_not_be_written_raises_the_epoch_once() -> None:
    shell = begun()
    shell.add(A)
    shell.write(shell.core.init_producer_id(ID, TIMEOUT_MS, None, None, shell.now), fails=True)
    assert (shell.known.state, shell.known.producer_epoch) == (S.ONGOING, 0)
    shell.init()
    assert (shell.known.state, shell.known.producer_epoch) == (S.PREPARE_ABORT, 1)


def test_a_producer_raises_its_own_epoch_and_may_retry_that() -> None:
    """KIP-360."""
    shell = begun()
    first = shell.producer
    second = shell.init(expected=first)
    assert second == ProducerEpoch(101, 1)
    assert shell.init(expected=first) == second, "a retry gets the same epoch"
    assert shell.init(expected=ProducerEpoch(101, 1)) == ProducerEpoch(101, 2)
    assert shell.init(expected=first) is E.producer_fenced
    assert shell.init(expected=ProducerEpoch(55, 2)) is E.producer_fenced


@pytest.mark.parametrize("version", [0, 2])
def test_a_fenced_producer_and_a_late_copy_of_a_request_abort_no_transaction(version: int) -> None:
    shell = begun(version=version)
    fenced = shell.producer
    assert shell.init(fenced) == ProducerEpoch(101, 1)
    assert shell.add(A, version=version) is E.none
    assert shell.init(fenced) is E.producer_fenced
    assert shell.add(B, version=version) is E.none, "the transaction goes on"
    assert shell.init(shell.producer) is E.concurrent_transactions, "the producer itself may give its transaction up"
    assert shell.known.state is S.PREPARE_ABORT


def test_a_new_producer_ends_the_retries_of_the_one_before_it() -> None:
    shell = begun()
    first = shell.producer
    shell.init(expected=first)
    assert shell.init() == ProducerEpoch(101, 2)
    assert shell.init(expected=first) is E.producer_fenced


def test_a_retry_is_recognised_by_the_next_coordinator() -> None:
    shell = begun()
    first = shell.producer
    second = shell.init(expected=first)
    successor = Shell(TransactionStore.from_snapshot(shell.store.snapshot()))
    assert successor.init(expected=first) == second


def restored(shell: Shell, version: int) -> Shell:
    """The coordinator after its state of this moment was restored, although it was not the last one."""
    found = Shell(TransactionStore.from_snapshot(restore_transactional_ids(shell.store.snapshot())), version=version)
    found.unused_id = 500
    return found


@pytest.mark.parametrize("version", [0, 2])
def test_a_restored_id_continues_with_another_producer_id(version: int) -> None:
    """Partitions may have batches of later epochs of the former producer id, of which the restored state knows nothing."""
    shell = begun(version=version)
    before = shell.producer
    assert shell.add(A, version=version) is E.none
    ongoing = restored(shell, version)
    assert shell.end(commit=True, version=version) is E.none
    decided = restored(shell, version)
    shell.complete()
    ended = restored(shell, version)

    assert ongoing.add(B, producer=before, version=version) is E.producer_fenced
    assert ongoing.init() is E.concurrent_transactions
    assert ongoing.known.producer_epoch == EPOCH_MAX, "whatever is open in its partitions is ended"
    assert (decided.known.state, decided.producer) == (S.PREPARE_COMMIT, shell.producer), "its markers end no later transaction"
    for each in (ongoing, decided):
        each.complete()
    for each in (ongoing, decided, ended):
        assert each.init(expected=before) is E.producer_fenced
        began = each.init()
        assert isinstance(began, ProducerEpoch)
        assert began.producer_id > before.producer_id


def test_an_exhausted_epoch_gives_the_producer_another_id() -> None:
    shell = begun()
    shell.store.transactions[ID] = shell.known.initialized(EPOCH_MAX - 1, -1, TIMEOUT_MS, 0)
    last = shell.producer
    assert shell.core.needs_producer_id(ID)
    renewed = shell.init(expected=last)
    assert isinstance(renewed, ProducerEpoch)
    assert renewed.producer_id != last.producer_id
    assert shell.init(expected=last) == renewed, "a retry"
    assert shell.init(expected=renewed) == ProducerEpoch(renewed.producer_id, 1)
    assert shell.init(expected=last) is E.producer_fenced


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_timeout_outside_the_limits_is_refused(timeout_ms: int) -> None:
    assert Shell().init(timeout_ms=timeout_ms) is E.invalid_transaction_timeout


def test_names_ids_and_partitions_are_bounded() -> None:
    shell = Shell(transactional_ids_max=1)
    for name in ("", "x" * 4_097):
        assert shell.core.init_producer_id(name, TIMEOUT_MS, None, 1, shell.now) is E.invalid_request
    assert isinstance(shell.init(), ProducerEpoch)
    assert shell.core.init_producer_id("another", TIMEOUT_MS, None, 1, shell.now) is E.coordinator_not_available
    names = [("a", index) for index in range(PARTITIONS_MAX + 1)]
    assert shell.add(*names) is E.invalid_request
    assert shell.add(*names[:-1]) is E.none


# -- verification


def test_a_batch_is_admitted_only_to_a_transaction_that_is_not_ending() -> None:
    shell = begun()
    shell.add(A)
    verified = shell.core.verify(ID, shell.producer)
    assert isinstance(verified, Transaction)
    assert verified.partitions == (A,)
    planned = shell.core.end(ID, shell.producer, commit=True, client_version=0, unused_id=None, now=shell.now)
    assert shell.core.verify(ID, shell.producer) is E.concurrent_transactions, "the decision is being written"
    shell.write(planned)
    assert shell.core.verify(ID, shell.producer) is E.concurrent_transactions


# -- time


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced() -> None:
    shell = begun()
    old = shell.producer
    shell.add(A)
    assert shell.core.wake_at_ms == shell.now_ms + TIMEOUT_MS
    shell.now_ms += TIMEOUT_MS - 1
    assert list(shell.core.timed_out(shell.now)) == []
    shell.now_ms += 1
    (abort,) = shell.core.timed_out(shell.now)
    shell.write(abort)
    assert (shell.known.state, shell.known.producer_epoch) == (S.PREPARE_ABORT, old.epoch + 1)
    shell.complete()
    assert shell.end(commit=True, producer=old) is E.producer_fenced
    assert list(shell.core.timed_out(shell.now)) == []


def test_an_abort_after_a_timeout_is_repeated_until_it_is_written() -> None:
    shell = begun()
    shell.add(A)
    shell.now_ms += TIMEOUT_MS
    (abort,) = shell.core.timed_out(shell.now)
    shell.write(abort, fails=True)
    shell.now_ms += 1_000
    (again,) = shell.core.timed_out(shell.now)
    assert again.producer_epoch == abort.producer_epoch


def test_the_timeout_continues_at_the_next_coordinator_whatever_its_clocks() -> None:
    shell = begun()
    shell.add(A)
    for elapsed_ms, rest_ms in ((10_000, TIMEOUT_MS - 10_000), (-(10**9), TIMEOUT_MS), (10**9, 0)):
        successor = Shell(TransactionStore.from_snapshot(shell.store.snapshot()), now_ms=shell.now_ms + elapsed_ms)
        assert successor.core.wake_at_ms == successor.now_ms + rest_ms


def test_ids_expire_when_they_have_no_transaction() -> None:
    shell = begun(expiration_ms=5_000)
    shell.add(A)
    shell.now_ms += 10_000
    assert list(shell.core.expired(shell.now)) == []
    shell.end(commit=True)
    shell.now_ms += 10_000
    assert list(shell.core.expired(shell.now)) == []
    shell.complete()
    shell.now_ms += 4_999
    assert list(shell.core.expired(shell.now)) == []
    shell.now_ms += 1
    (expired,) = shell.core.expired(shell.now)
    assert shell.init() is E.concurrent_transactions
    shell.write(expired)
    assert shell.store.transactions == {}


# -- KIP-890: an epoch for every transaction


def test_every_transaction_raises_the_epoch_of_its_producer() -> None:
    shell = begun(version=2)
    first = shell.producer
    assert shell.add(A, version=2) is E.none
    assert shell.end(commit=True, version=2) is E.none
    assert shell.producer == ProducerEpoch(101, 1), "markers have the raised epoch"
    assert shell.end(commit=True, producer=first, version=2) is E.concurrent_transactions
    shell.complete()
    assert shell.end(commit=True, producer=first, version=2) is E.none, "a retry"
    assert shell.end(commit=False, producer=first, version=2) is E.invalid_txn_state
    assert shell.add(A, producer=first, version=2) is E.producer_fenced
    assert shell.end(commit=True, version=2) is E.invalid_txn_state, "the next transaction has not begun"


def test_an_abort_without_partitions_raises_the_epoch() -> None:
    shell = begun(version=2)
    first = shell.producer
    assert shell.end(commit=False, version=2) is E.none
    assert (shell.known.state, shell.producer) == (S.PREPARE_ABORT, ProducerEpoch(101, 1))
    shell.complete()
    assert shell.end(commit=False, producer=first, version=2) is E.none
    assert shell.known.producer_epoch == 1, "a retry raises nothing"
    assert shell.end(commit=False, version=2) is E.none
    assert shell.known.producer_epoch == 2


@pytest.mark.parametrize("commit", [True, False])
def test_an_abort_without_partitions_waits_for_the_markers_of_the_transaction_before_it(commit: bool) -> None:
    shell = begun(version=2)
    shell.add(A, version=2)
    shell.end(commit=commit, version=2)
    assert shell.end(commit=False, version=2) is E.concurrent_transactions, "the producer knows its next epoch already"
    shell.complete()
    assert shell.end(commit=False, version=2) is E.none


def time_out(shell: Shell) -> None:
    """Add a partition, and abort the transaction after its timeout."""
    shell.add(A, version=2)
    shell.now_ms += TIMEOUT_MS
    (abort,) = shell.core.timed_out(shell.now)
    shell.write(abort)


def test_a_producer_whose_transaction_timed_out_aborts_it_and_goes_on() -> None:
    shell = begun(version=2)
    first = shell.producer
    time_out(shell)
    assert shell.producer == ProducerEpoch(101, 1), "markers have the raised epoch"
    assert shell.end(commit=False, producer=first, version=2) is E.concurrent_transactions
    shell.complete()
    assert shell.add(A, producer=first, version=2) is E.producer_fenced
    assert shell.end(commit=True, producer=first, version=2) is E.invalid_txn_state
    assert shell.end(commit=False, producer=first, version=2) is E.none
    assert shell.producer == ProducerEpoch(101, 1), "EndTxn answers with the next transaction's epoch"
    assert shell.add(A, version=2) is E.none
    assert shell.end(commit=True, version=2) is E.none


def test_the_next_coordinator_lets_a_producer_abort_what_has_timed_out() -> None:
    shell = begun(version=2)
    first = shell.producer
    time_out(shell)
    successor = Shell(TransactionStore.from_snapshot(shell.store.snapshot()), version=2)
    successor.complete()
    assert successor.end(commit=False, producer=first, version=2) is E.none
    assert successor.producer == ProducerEpoch(101, 1)


def test_a_producer_whose_transaction_timed_out_can_raise_its_epoch() -> None:
    shell = begun(version=2)
    first = shell.producer
    time_out(shell)
    shell.complete()
    assert shell.init(expected=first) == ProducerEpoch(101, 1)
    assert shell.end(commit=False, producer=first, version=2) is E.producer_fenced, "that transaction is forgotten"


def test_a_producer_without_an_epoch_per_transaction_is_fenced_after_a_timeout() -> None:
    shell = begun(version=2)
    first = shell.producer
    time_out(shell)
    shell.complete()
    for commit in (True, False):
        assert shell.end(commit=commit, producer=first, version=0) is E.producer_fenced


def test_a_new_producer_fences_the_old_one_although_its_abort_raised_the_epoch_once() -> None:
    shell = begun(version=2)
    first = shell.producer
    shell.add(A, version=2)
    assert shell.init() is E.concurrent_transactions
    assert shell.known.producer_epoch == 1
    shell.complete()
    assert shell.init() == ProducerEpoch(101, 2)
    for commit in (True, False):
        assert shell.end(commit=commit, producer=first, version=2) is E.producer_fenced


def at_the_last_epoch(version: int = 2) -> Shell:
    shell = begun(version=version)
    shell.store.transactions[ID] = shell.known.initialized(EPOCH_MAX - 1, -1, TIMEOUT_MS, 0)
    return shell


def test_a_producer_whose_transaction_timed_out_at_the_last_epoch_goes_on_with_another_id() -> None:
    shell = at_the_last_epoch()
    last = shell.producer
    shell.spare_ids.append(900)
    time_out(shell)
    assert shell.producer == ProducerEpoch(101, EPOCH_MAX), "markers have an epoch that no producer is given"
    shell = Shell(TransactionStore.from_snapshot(shell.store.snapshot()), version=2)
    assert shell.end(commit=False, producer=last, version=2) is E.concurrent_transactions
    shell.complete()
    assert shell.end(commit=True, producer=last, version=2) is E.invalid_txn_state
    assert shell.end(commit=False, producer=last, version=2) is E.none
    assert shell.producer == ProducerEpoch(900, 0), "EndTxn answers with the next transaction's id"
    assert shell.init(expected=last) == ProducerEpoch(900, 0)


def test_a_timeout_at_the_last_epoch_waits_for_an_unused_id() -> None:
    shell = at_the_last_epoch()
    shell.add(A, version=2)
    shell.now_ms += TIMEOUT_MS
    assert list(shell.core.timed_out(shell.now)) == []
    assert shell.known.state is S.ONGOING
    assert shell.core.wake_at_ms is not None
    shell.now_ms = shell.core.wake_at_ms
    shell.spare_ids.append(900)
    (abort,) = shell.core.timed_out(shell.now)
    assert abort.next_producer_id == 900
    assert shell.spare_ids == []


def test_a_new_producer_at_the_last_epoch_fences_the_old_one() -> None:
    shell = at_the_last_epoch()
    last = shell.producer
    shell.add(A, version=2)
    assert shell.core.init_producer_id(ID, TIMEOUT_MS, None, None, shell.now) is E.concurrent_transactions
    assert shell.known.state is S.ONGOING, "the abort needs an unused id"
    assert shell.init() is E.concurrent_transactions
    shell.complete()
    renewed = shell.init()
    assert isinstance(renewed, ProducerEpoch)
    assert renewed.producer_id != last.producer_id
    assert shell.end(commit=False, producer=last, version=2) is E.invalid_producer_id_mapping
    assert shell.init(expected=last) is E.producer_fenced


def test_a_producer_at_its_last_epoch_may_begin_another_one_during_a_transaction() -> None:
    shell = at_the_last_epoch()
    last = shell.producer
    shell.add(A, version=2)
    assert shell.init(expected=last) is E.concurrent_transactions
    shell.complete()
    renewed = shell.init(expected=last)
    assert isinstance(renewed, ProducerEpoch)
    assert (renewed.producer_id, renewed.epoch) != last
    assert renewed.epoch == 0


def test_a_timeout_at_the_last_epoch_below_version_2_fences_the_producer() -> None:
    shell = at_the_last_epoch(version=0)
    last = shell.producer
    shell.add(A)
    shell.now_ms += TIMEOUT_MS
    (abort,) = shell.core.timed_out(shell.now)
    shell.write(abort)
    shell.complete()
    assert shell.producer == ProducerEpoch(101, EPOCH_MAX)
    assert shell.end(commit=False, producer=last) is E.producer_fenced
    assert shell.init(expected=last) is E.producer_fenced


def test_the_last_epoch_of_an_id_continues_with_another_id() -> None:
    shell = begun(version=2)
    shell.store.transactions[ID] = shell.known.initialized(EPOCH_MAX - 1, -1, TIMEOUT_MS, 0)
    last = shell.producer
    shell.add(A, version=2)
    assert shell.end(commit=True, version=2) is E.none
    assert (shell.known.producer_id, shell.known.producer_epoch) == (last.producer_id, EPOCH_MAX)
    renewed = ProducerEpoch(shell.known.next_producer_id, 0)
    assert shell.add(B, producer=renewed, version=2) is E.concurrent_transactions, "the producer knows its next id already"
    assert shell.end(commit=False, producer=renewed, version=2) is E.concurrent_transactions
    assert shell.init(expected=renewed) is E.concurrent_transactions
    shell.complete()
    assert shell.producer == renewed
    assert shell.end(commit=True, producer=last, version=2) is E.none, "a retry of the client, which knows only its old id"
    assert shell.add(B, version=2) is E.none
