"""The extents read for a request: they contain exactly its entries, and little else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.disk.core.extents import (
    EXTENTS_MAX,
    GAP_BYTES_MAX,
    WASTED_SHARE_MAX,
    ReadPieces,
    pieces_of,
)
from stratalog_bookies.disk.core.index import Row
from stratalog_bookies.disk.core.lookup import Place
from stratalog_core.ports import Extent

KIB = 1024
BYTES_MIN = 64 * KIB


def places(*entries: tuple[int, int, int]) -> list[Place]:
    """Places of ``(generation, position, payload bytes)``."""
    return [
        Place(1, generation, Row(number, position, size, 0, -1, 0))
        for number, (generation, position, size) in enumerate(entries)
    ]


@st.composite
def logs(draw: st.DrawFn) -> list[Place]:
    """Entries in up to three files, in any order, with gaps in between."""
    entries = []
    for generation in range(draw(st.integers(1, 3))):
        position = 4096
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 64 * KIB), st.integers(0, 300 * KIB)), max_size=12)):
            position += gap
            entries.append((generation, position, size))
            position += size
    return places(*draw(st.permutations(entries)))


@given(logs())
def test_slices_are_the_entries_wherever_they_lie(wanted: list[Place]) -> None:
    pieces = pieces_of(wanted, BYTES_MIN)
    if pieces is None:
        return
    assert [len(wanted)] == [len(pieces.slices)]
    for place, (file, piece, start, end) in zip(wanted, pieces.slices, strict=True):
        extent = pieces.files[file].extents[piece]
        assert pieces.files[file].generation == place.generation
        assert extent.position + start == place.row.position
        assert end - start == place.row.payload_bytes
        assert end <= extent.length
    for each in pieces.files:
        for before, after in zip(each.extents, each.extents[1:], strict=False):
            assert after.position > before.position + before.length + GAP_BYTES_MAX, "else they were one"
    read = [extent.length for each in pieces.files for extent in each.extents]
    assert len(read) <= EXTENTS_MAX
    assert sum(place.row.payload_bytes for place in wanted) >= sum(read) * (1 - WASTED_SHARE_MAX)


def extents(pieces: ReadPieces | None) -> list[tuple[int, list[Extent]]]:
    assert pieces is not None
    return [(file.generation, file.extents) for file in pieces.files]


def test_neighbours_are_one_piece_and_what_lies_apart_is_not() -> None:
    size = 100 * KIB
    near, far = 4096 + size + 1000, 4096 + 10 * size
    found = pieces_of(places((1, 4096, size), (1, near, size), (1, far, size), (2, far, size)), BYTES_MIN)
    assert extents(found) == [(1, [Extent(4096, 2 * size + 1000), Extent(far, size)]), (2, [Extent(far, size)])]


def test_little_scattered_or_many_pieces_are_left_to_the_page_cache() -> None:
    assert pieces_of(places((1, 4096, BYTES_MIN - 1)), BYTES_MIN) is None
    assert pieces_of(places((1, 4096, BYTES_MIN)), BYTES_MIN) is not None
    assert pieces_of(places(*((1, 4096 + 20 * KIB * number, KIB) for number in range(100))), BYTES_MIN) is None, (
        "mostly others' entries"
    )
    apart = [(1, 4096 + 200 * KIB * number, 100 * KIB) for number in range(EXTENTS_MAX + 1)]
    assert pieces_of(places(*apart), BYTES_MIN) is None
    assert pieces_of(places(*apart[1:]), BYTES_MIN) is not None
    assert pieces_of([], BYTES_MIN) is None
