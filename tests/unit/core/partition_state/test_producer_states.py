"""Idempotent producers: examples of Kafka's rules, and random traffic against a model that remembers everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.partition_state.producer_states import BATCHES_REMEMBERED, Displaced, ProducerStates, Verdict

_MAX = 2**31 - 1


def header(producer_id: int, epoch: int, base_sequence: int, records: int) -> BatchHeader:
    return BatchHeader(0, 49, 0, 2, 0, 0, records - 1, 0, 0, producer_id, epoch, base_sequence, records)


def states() -> ProducerStates:
    return ProducerStates(producers_max=100)


def test_a_retry_is_recognised_among_the_last_five_batches() -> None:
    producers = states()
    for number in range(6):
        batch = header(1, 0, number * 10, 10)
        assert producers.judge(batch) == (Verdict.APPEND if number else Verdict.UNKNOWN, None)
        producers.appended(batch, 100 + number * 10)
    assert producers.judge(header(1, 0, 0, 10))[0] is Verdict.OUT_OF_ORDER
    verdict, earlier = producers.judge(header(1, 0, 10, 10))
    assert verdict is Verdict.DUPLICATE
    assert earlier is not None
    assert (earlier.base_offset, earlier.last_offset) == (110, 119)


def test_a_gap_is_refused() -> None:
    producers = states()
    producers.appended(header(1, 0, 0, 10), 0)
    assert producers.judge(header(1, 0, 11, 1))[0] is Verdict.OUT_OF_ORDER
    assert producers.judge(header(1, 0, 5, 5))[0] is Verdict.OUT_OF_ORDER


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    producers = states()
    producers.appended(header(1, 3, 0, 10), 0)
    assert producers.judge(header(1, 2, 10, 1))[0] is Verdict.FENCED
    assert producers.judge(header(1, 4, 10, 1))[0] is Verdict.OUT_OF_ORDER
    assert producers.judge(header(1, 4, 0, 1))[0] is Verdict.APPEND


def test_an_unknown_producer_may_begin_anywhere() -> None:
    assert states().judge(header(7, 5, 1234, 1))[0] is Verdict.UNKNOWN


def test_sequences_wrap() -> None:
    producers = states()
    producers.appended(header(1, 0, _MAX - 1, 2), 0)
    assert producers.judge(header(1, 0, 0, 1))[0] is Verdict.APPEND
    producers.appended(header(1, 0, 0, 1), 2)
    producers = states()
    producers.appended(header(1, 0, _MAX, 3), 10)
    verdict, earlier = producers.judge(header(1, 0, _MAX, 3))
    assert verdict is Verdict.DUPLICATE
    assert earlier is not None
    assert (earlier.last_sequence, earlier.base_offset) == (1, 10)


def test_the_longest_silent_producer_is_forgotten() -> None:
    producers = ProducerStates(producers_max=2)
    for producer_id in (1, 2, 1, 3):
        producers.appended(header(producer_id, 0, 0 if producer_id != 1 else len(producers) * 5, 5), 0)
    assert producers.judge(header(2, 0, 99, 1))[0] is Verdict.UNKNOWN
    assert producers.judge(header(1, 0, 99, 1))[0] is Verdict.OUT_OF_ORDER


class Sender:
    """Producers that send in order into one log, of which the first ``confirmed`` batches are confirmed."""

    def __init__(self) -> None:
        self.states = states()
        self.log: list[tuple[BatchHeader, int]] = []
        self.displaced: list[Displaced] = []
        self.confirmed = 0
        self.sequences: dict[tuple[int, int], int] = {}
        self.epochs: dict[int, int] = {}

    def send(self, producer_id: int, records: int, *, new_epoch: bool = False) -> None:
        epoch = self.epochs[producer_id] = self.epochs.get(producer_id, 0) + new_epoch
        sequence = self.sequences.get((producer_id, epoch), 0)
        batch = header(producer_id, epoch, sequence, records)
        base_offset = self.log[-1][1] + self.log[-1][0].record_count if self.log else 0
        assert self.states.judge(batch)[0] in (Verdict.APPEND, Verdict.UNKNOWN)
        self.sequences[producer_id, epoch] = sequence + records
        self.log.append((batch, base_offset))
        self.displaced.append(self.states.appended(batch, base_offset))

    def snapshot(self) -> tuple[ProducerEntry, ...]:
        unconfirmed = range(len(self.log) - 1, self.confirmed - 1, -1)
        return self.states.snapshot((self.log[at][0].producer_id, self.displaced[at]) for at in unconfirmed)

    def replayed(self) -> tuple[ProducerEntry, ...]:
        """Return the state after a takeover of a log that ends with the last confirmed batch."""
        replayed = states()
        for batch, base_offset in self.log[: self.confirmed]:
            replayed.appended(batch, base_offset)
        return replayed.snapshot()


@pytest.mark.parametrize("in_flight", range(1, 9))
def test_a_snapshot_knows_a_producer_whose_whole_pipeline_is_unconfirmed(in_flight: int) -> None:
    sender = Sender()
    sender.send(1, 10)
    sender.confirmed = 1
    for _ in range(in_flight):
        sender.send(1, 10)
    successor = states()
    successor.load(sender.snapshot())
    assert successor.judge(header(1, 0, 10, 10)) == (Verdict.APPEND, None)
    assert successor.judge(header(1, 0, 20, 10))[0] is Verdict.OUT_OF_ORDER
    assert successor.judge(header(1, 0, 0, 10))[0] is Verdict.DUPLICATE


def test_a_snapshot_keeps_the_epoch_before_one_that_is_unconfirmed() -> None:
    sender = Sender()
    sender.send(1, 10)
    sender.confirmed = 1
    sender.send(1, 10, new_epoch=True)
    sender.send(1, 10, new_epoch=True)
    successor = states()
    successor.load(sender.snapshot())
    assert successor.judge(header(1, 0, 10, 10)) == (Verdict.APPEND, None)
    assert successor.judge(header(1, 1, 0, 10)) == (Verdict.APPEND, None)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 3), st.booleans()),
            st.tuples(st.just("confirm"), st.integers(1, 7), st.just(0), st.just(False)),
        ),
        max_size=60,
    )
)
def test_a_snapshot_is_what_a_replay_of_all_confirmed_batches_gives(steps: list[tuple[str, int, int, bool]]) -> None:
    """With any number of unconfirmed batches of any producers and epochs."""
    sender = Sender()
    for step, first, records, new_epoch in steps:
        if step == "send":
            sender.send(first, records, new_epoch=new_epoch)
        else:
            sender.confirmed = min(sender.confirmed + first, len(sender.log))
        assert {one.producer_id: one for one in sender.snapshot()} == {one.producer_id: one for one in sender.replayed()}


sends = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3), st.integers(1, 3))


@given(
    st.lists(
        st.one_of(sends.map(lambda s: ("send", *s)), st.tuples(st.just("retry"), st.integers(0, 30)), st.just(("reload",)))
    )
)
def test_no_batch_is_ever_appended_twice(steps: list[tuple[object, ...]]) -> None:
    """Producers send in sequence or with gaps, retry at will, and the state is rebuilt from a snapshot now and then."""
    producers = states()
    log: list[BatchHeader] = []
    offsets: dict[tuple[int, int, int], int] = {}
    next_offset = 0
    next_sequence: dict[tuple[int, int], int] = {}
    for step in steps:
        if step[0] == "reload":
            reloaded = states()
            reloaded.load(producers.snapshot())
            producers = reloaded
            continue
        if step[0] == "retry":
            if not log:
                continue
            batch = log[int(str(step[1])) % len(log)]
        else:
            _, producer_id, epoch, gap, records = (step[0], *map(int, map(str, step[1:])))
            batch = header(producer_id, epoch, next_sequence.get((producer_id, epoch), 0) + (gap if gap == 3 else 0), records)
        verdict, earlier = producers.judge(batch)
        key = (batch.producer_id, batch.producer_epoch, batch.base_sequence)
        if verdict is Verdict.DUPLICATE:
            assert earlier is not None
            assert offsets[key] == earlier.base_offset
        elif verdict in (Verdict.APPEND, Verdict.UNKNOWN):
            assert key not in offsets, "appended twice"
            producers.appended(batch, next_offset)
            log.append(batch)
            offsets[key] = next_offset
            next_offset += batch.record_count
            next_sequence[(batch.producer_id, batch.producer_epoch)] = batch.last_sequence + 1
        producers.validate_state()
    assert len(producers) <= 3
    assert BATCHES_REMEMBERED == 5
