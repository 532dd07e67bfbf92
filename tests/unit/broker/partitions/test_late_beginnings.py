"""The first of several refused batches of an unknown producer begins, whichever comes first afterwards."""

from __future__ import annotations

from unit.broker.transactional import transactional

from stratalog_broker.partitions import late_beginnings
from stratalog_broker.partitions.late_beginnings import LateBeginnings
from stratalog_core.batches.batch import BatchHeader, read_header


def sent(sequence: int, producer_id: int = 1, epoch: int = 0) -> BatchHeader:
    return read_header(transactional(producer_id, sequence, b"v", epoch=epoch))


def test_only_the_lowest_refused_sequence_begins() -> None:
    beginnings = LateBeginnings()
    for sequence in (32, 31, 34):
        beginnings.refused(sent(sequence))
    assert not beginnings.may_begin(sent(32))
    assert beginnings.may_begin(sent(40, epoch=1)), "another epoch"
    assert beginnings.may_begin(sent(40, producer_id=2)), "another producer"
    assert beginnings.may_begin(sent(31))
    assert beginnings.may_begin(sent(32)), "its beginning is over"


def test_their_number_is_bounded() -> None:
    beginnings = LateBeginnings()
    for producer_id in range(late_beginnings.PRODUCERS_MAX + 1):
        beginnings.refused(sent(5, producer_id=producer_id))
    assert beginnings.may_begin(sent(9, producer_id=0)), "the first is forgotten"
    assert not beginnings.may_begin(sent(9, producer_id=1))
