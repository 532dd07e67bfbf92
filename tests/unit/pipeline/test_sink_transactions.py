"""Names and checksums of units; brokers are met in ``tests/integration/test_exactly_once.py``."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from stratalog_pipeline.kafka_sink import Row
from stratalog_pipeline.sink_transactions import RowsSum, Unit

ROWS = st.lists(
    st.fixed_dictionaries({"key": st.none() | st.binary(max_size=3), "value": st.none() | st.binary(max_size=3)}), max_size=8
)


def summed(rows: list[Row]) -> tuple[int, int]:
    total = RowsSum()
    assert list(total.counted(rows)) == rows
    return total.rows, total.checksum


@given(rows=ROWS, shuffler=st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[Row], shuffler: Random) -> None:
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    assert summed(shuffled) == summed(rows)


def test_other_rows_have_another_checksum() -> None:
    fields = (None, b"", b"a", b"b", b"ab")
    rows: list[Row] = [{"key": key, "value": value} for key in fields for value in fields]
    assert len({summed([row]) for row in rows}) == len(rows)
    assert summed(rows[:1] * 2) != summed(rows[:1])
    assert summed([{"key": "k", "value": "é"}]) == summed([{"key": b"k", "value": "é".encode()}]), "text is sent as UTF-8"


def test_all_batches_of_a_task_share_one_transactional_id() -> None:
    names = {Unit(write="w", batch=batch, task=task).name for batch in range(3) for task in range(2)}
    assert names == {"stratalog-sink-w-0", "stratalog-sink-w-1"}
