"""The map of keys is a dictionary with a bound, however it grows."""

from __future__ import annotations

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.record_spans import RecordSpans, batch_body, record_spans
from stratalog_core.batches.records import Record, build_batch
from stratalog_tiering.core.offset_map import OffsetMap


def spans_of(keys: list[bytes | None], base_offset: int) -> RecordSpans:
    records = [Record(offset=base_offset + row, timestamp_ms=0, key=key, value=b"") for row, key in enumerate(keys)]
    batch = build_batch(records)
    header = read_header(batch)
    return record_spans(batch_body(batch, header), header)


def test_a_map_grows_to_its_bound_and_forgets_nothing() -> None:
    keys_max, base_offset = 20_000, 0
    found, expected = OffsetMap(keys_max, b"secret"), dict[bytes, int]()
    while len(expected) < keys_max:
        keys: list[bytes | None] = [b"%d" % ((base_offset + row) * 7919 % 30_011) * (row % 5 + 1) for row in range(1000)]
        spans = spans_of([None, *keys], base_offset)
        noted = found.put(spans, base_offset, 0)
        for row, key in enumerate(keys[: noted - 1], base_offset + 1):
            assert key is not None
            expected[key] = row
        assert len(found) == len(expected)
        base_offset += len(spans)
    assert len(expected) == keys_max
    assert found.newest(spans_of([*expected], 0)).tolist() == [*expected.values()]
    assert found.newest(spans_of([b"absent", None], 0)).tolist() == [-1, -1]
    assert found.put(spans_of([None, b"another", b"more"], base_offset), base_offset, 0) == 1
    known = next(iter(expected))
    assert found.put(spans_of([known], base_offset), base_offset, 0) == 1
    assert found.newest(spans_of([known], 0)).tolist() == [base_offset]


def test_offsets_before_the_dirty_part_are_passed_over() -> None:
    found = OffsetMap(10, b"secret")
    assert found.put(spans_of([b"a", b"b", b"a"], 5), 5, 6) == 3
    assert found.newest(spans_of([b"a", b"b"], 0)).tolist() == [7, 6]
    assert OffsetMap(10, b"other").newest(spans_of([b"a"], 0)).tolist() == [-1]


def test_the_fingerprint_depends_on_each_counted_record_and_on_the_offset() -> None:
    found, spans = OffsetMap(10, b"secret"), spans_of([b"a", b"b"], 0)
    made = {
        found.fingerprint(spans, spans.have_keys & [first, second], base_offset)
        for first in (True, False)
        for second in (True, False)
        for base_offset in (0, 1)
    }
    assert len(made) == 7, "no record counts as nothing at either offset"
    assert OffsetMap(10, b"other").fingerprint(spans, spans.have_keys, 0) not in made
