"""The index: runs compared with a dict, copies in two files, and rows that are evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.disk.core import checkpoint
from stratalog_bookies.disk.core.checkpoint import ClosedFile, LedgerState, State
from stratalog_bookies.disk.core.index import ROW, ROW_BYTES, Ledger, Row, Run, RunCache, clusters, merged
from stratalog_bookies.protocol.ids import ID_MAX
from stratalog_core.errors import Corrupt


def run_of(entry_ids: list[int], generation: int = 1, ledger_id: int = 7) -> Run:
    run = Run(ledger_id, generation)
    for entry_id in entry_ids:
        run.add(entry_id, ROW.pack(entry_id, entry_id * 10, 5, generation, entry_id - 1, entry_id + 7))
        run.payload_bytes += 5
    return run


@given(entry_ids=st.lists(st.integers(0, 200), unique=True), first=st.integers(0, 210), last=st.integers(0, 210))
def test_a_run_finds_what_a_dict_would(entry_ids: list[int], first: int, last: int) -> None:
    run = run_of(entry_ids)
    for entry_id in range(0, 211, 7):
        found = run.find(entry_id)
        assert (found is not None) == (entry_id in entry_ids)
        assert found is None or found == Row(entry_id, entry_id * 10, 5, 1, entry_id - 1, entry_id + 7)
    assert [row.entry_id for row in run.between(first, last)] == sorted(each for each in entry_ids if first <= each <= last)


@given(runs=st.lists(st.lists(st.integers(0, 60), unique=True, min_size=1), max_size=5))
def test_of_two_copies_the_newer_file_counts(runs: list[list[int]]) -> None:
    ledger = Ledger(7)
    ledger.runs = [run_of(entry_ids, generation) for generation, entry_ids in enumerate(runs, start=1)]
    expected = {entry_id: generation for generation, entry_ids in enumerate(runs, start=1) for entry_id in entry_ids}
    found = [
        (row.entry_id, run.generation)
        for cluster in clusters(ledger.runs_between(10, 50))
        for run, row in merged(cluster, 10, 50, lambda _, __: True)
    ]
    assert found == sorted((entry, generation) for entry, generation in expected.items() if 10 <= entry <= 50)


def test_the_cache_lets_go_of_what_was_used_longest_ago() -> None:
    runs = [run_of([1, 2, 3], generation) for generation in range(3)]
    cache = RunCache(2 * 3 * ROW_BYTES)
    for run in runs[:2]:
        assert run.rows is not None
        cache.keep(run, bytes(run.rows))
    cache.touch(runs[0])
    assert runs[2].rows is not None
    cache.keep(runs[2], bytes(runs[2].rows))
    assert cache.bytes == 3 * 3 * ROW_BYTES
    cache.trim()
    assert [run.rows is None for run in runs] == [False, True, False]
    cache.drop(runs[0])
    cache.drop(runs[0])
    assert cache.bytes == 3 * ROW_BYTES


@given(runs=st.lists(st.lists(st.integers(0, 1000), unique=True, min_size=1), max_size=6))
def test_an_index_file_gives_back_runs_and_rows(runs: list[list[int]]) -> None:
    stored = [run_of(entry_ids, 9, ledger_id) for ledger_id, entry_ids in enumerate(runs)]
    content = checkpoint.encode_index(9, stored)
    header = content[: checkpoint.INDEX_HEADER_BYTES]
    table_bytes = checkpoint.index_table_bytes(header, 9)
    table = content[checkpoint.INDEX_HEADER_BYTES : checkpoint.INDEX_HEADER_BYTES + table_bytes]
    for before, after in zip(stored, checkpoint.decode_index_table(header, table, 9), strict=True):
        assert (after.first, after.last, after.count, after.payload_bytes) == (
            before.first, before.last, before.count, before.payload_bytes
        )  # fmt: skip
        rows = content[after.stored_at : after.stored_at + after.count * ROW_BYTES]
        assert checkpoint.check_rows(after, rows) == before.rows
        with pytest.raises(Corrupt):
            checkpoint.check_rows(after, rows[:-1] + bytes([rows[-1] ^ 1]))
    with pytest.raises(Corrupt):
        checkpoint.decode_index_table(header, table + b"x", 9)
    with pytest.raises(Corrupt):
        checkpoint.index_table_bytes(header, 8)
    with pytest.raises(Corrupt):
        checkpoint.index_table_bytes(header[:5], 9)


def test_a_state_file_gives_back_the_state() -> None:
    ledgers = [
        LedgerState(ledger_id=ID_MAX, lac=-1, last_entry=17, fenced=True),
        LedgerState(ledger_id=0, lac=5, last_entry=5, fenced=False),
    ]
    state = State(
        next_generation=12,
        closed=(ClosedFile(generation=3, end=4096),),
        ledgers=checkpoint.pack_ledgers(ledgers),
        tombstones=checkpoint.pack_tombstones([9, ID_MAX - 1]),
    )
    content = checkpoint.encode_state(state)
    assert checkpoint.decode_state(content) == state
    assert checkpoint.unpack_ledgers(state.ledgers) == ledgers
    assert checkpoint.unpack_tombstones(state.tombstones) == [9, ID_MAX - 1]
    for position in range(len(content)):
        with pytest.raises(Corrupt):
            checkpoint.decode_state(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    with pytest.raises(Corrupt, match="cut short"):
        checkpoint.decode_state(content[:10])
