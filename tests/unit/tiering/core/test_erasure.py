"""What an erasure leaves of arbitrary batches, compared with the plain decoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_batches import CODECS, KINDS, hostile_batch

from stratalog_core.batches.batch import TIMESTAMP_TYPE_BIT, check_batch, read_header, write_header
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt
from stratalog_tiering.core.erasure import NEEDLES_MAX, EraseFilter, Selection, selected, selected_or_unreadable

KEYS = st.sampled_from([None, b"", b"a", b"b", b"alice", b"x" * 40])
VALUES = st.sampled_from([None, b"", b"a", b"alice"])
HEADERS = st.lists(st.tuples(st.sampled_from(["", "a", "user", "\u00e9"]), VALUES), max_size=3)
ROWS = st.lists(st.tuples(KEYS, VALUES, HEADERS, st.integers(1, 3)), min_size=1, max_size=6)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    offset, records = 100, []
    for key, value, headers, step in draw(ROWS):
        records.append(Record(offset=offset, timestamp_ms=1000 - offset, key=key, value=value, headers=tuple(headers)))
        offset += step
    codec, attributes = draw(st.sampled_from([0, 1, 4])), draw(st.sampled_from([0, TIMESTAMP_TYPE_BIT]))
    made = build_batch(
        records, compression=codec, attributes=attributes, producer_id=5, producer_epoch=1, base_sequence=7, leader_epoch=3
    )
    return bytes(made)


NAMES = st.sampled_from([b"", b"user", "\u00e9".encode()])
SELECTIONS = st.builds(
    Selection,
    keys=st.frozensets(st.sampled_from([b"", b"a", b"alice", b"nobody"])),
    headers=st.frozensets(st.tuples(NAMES, st.sampled_from([b"", b"a", b"alice"]))),
)


@given(batches(), SELECTIONS)
def test_exactly_the_selected_records_go(batch: bytes, selection: Selection) -> None:
    header, before = read_header(batch), [*iterate_records(batch)]
    gone = [
        record
        for record in before
        if record.key in selection.keys or {(name.encode(), value) for name, value in record.headers} & selection.headers
    ]
    assert selected(batch, header, selection) == len(gone)
    rules = EraseFilter(selection=selection)
    left = rules.filter(batch, header, is_last=False).batch
    assert left is not None
    if not gone:
        assert left is batch
        return
    after = check_batch(left)
    assert [*iterate_records(left)] == [record for record in before if record not in gone] == rules.altered[0]
    assert (after.base_offset, after.last_offset, after.leader_epoch) == (100, header.last_offset, 3)
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (5, 1, 7)
    assert (rules.records_erased, [each.index for each in rules.erased_leaves()]) == (len(gone), [0])


EVERY = Selection(keys=frozenset(b"key %d" % number for number in range(NEEDLES_MAX + 1)))
"""So many keys that each record is located."""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_cannot_be_read_stays_and_is_counted(kind: str, codec: int) -> None:
    batch = hostile_batch(kind, codec)
    header = read_header(batch)
    assert isinstance(selected_or_unreadable(batch, header, EVERY), Corrupt)
    rules = EraseFilter(selection=EVERY)
    assert rules.filter(batch, header, is_last=False).batch is batch
    assert (rules.unreadable_batches, rules.records_erased, rules.altered) == (1, 0, {})


def test_a_batch_with_a_selected_record_beside_an_unreadable_one_stays() -> None:
    """The kernel that locates records does not read headers, the decoder that decides what must be left does."""
    first = Record(offset=0, timestamp_ms=0, key=b"alice", value=b"v")
    batch = build_batch([first, Record(offset=1, timestamp_ms=0, key=b"bob", value=b"v", headers=(("", b""),))])
    batch[-1] = 2  # The header's value would have one byte more.
    write_header(batch, read_header(batch))
    header = check_batch(batch)
    rules = EraseFilter(selection=Selection(keys=frozenset({b"alice"})))
    assert rules.filter(batch, header, is_last=False).batch is batch
    assert (rules.unreadable_batches, rules.altered) == (1, {})
