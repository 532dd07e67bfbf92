"""Which pieces of log files to read for a request, and where its entries lie in them: sans-IO.

Entries of one ledger lie between others' in the log. Neighbours with little between them are one piece. Whole requests that are
large enough are read directly, all pieces side by side: measured a third of the CPU of reading through the page cache, which
copies every byte and, on a bookie whose logs are written around it, first has to find a page for each. What is small, or lies
scattered, goes through the page cache, where the kernel reads ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_bookies.disk.core.lookup import Place
from stratalog_core.ports import Extent

GAP_BYTES_MAX: Final = 32 * 1024
"""So much between two entries is read and thrown away: a read of its own costs as much."""
WASTED_SHARE_MAX: Final = 0.5
EXTENTS_MAX: Final = 32


class FilePieces(NamedTuple):
    """Pieces of one log file, in ascending order."""

    generation: int
    extents: list[Extent]


class Slice(NamedTuple):
    """An entry's payload: which piece of which file (both by index), and from where to where in it."""

    file: int
    piece: int
    start: int
    end: int


class ReadPieces(NamedTuple):
    """``slices`` are in the order of the places."""

    files: list[FilePieces]
    slices: list[Slice]


def pieces_of(places: Sequence[Place], bytes_min: int) -> ReadPieces | None:
    """What to read around the page cache for these entries; None if the page cache serves them better.

    That is so for less than ``bytes_min`` of payload, for more than ``EXTENTS_MAX`` pieces, and where most of the bytes
    between the entries belong to others.
    """
    payload_bytes = sum([place.row.payload_bytes for place in places])
    if payload_bytes < bytes_min:
        return None
    pieces = _gathered(places)
    extents = [extent for file in pieces.files for extent in file.extents]
    read_bytes = sum([extent.length for extent in extents])
    if len(extents) > EXTENTS_MAX or payload_bytes < read_bytes * (1 - WASTED_SHARE_MAX):
        return None
    return pieces


def _gathered(places: Sequence[Place]) -> ReadPieces:
    files: list[FilePieces] = []
    slices: list[Slice | None] = [None] * len(places)
    for index in sorted(range(len(places)), key=lambda index: (places[index].generation, places[index].row.position)):
        generation, row = places[index].generation, places[index].row
        if not files or files[-1].generation != generation:
            files.append(FilePieces(generation, []))
        extents = files[-1].extents
        end = row.position + row.payload_bytes
        if extents and row.position <= extents[-1].position + extents[-1].length + GAP_BYTES_MAX:
            position, length = extents[-1]
            extents[-1] = Extent(position, max(length, end - position))
        else:
            extents.append(Extent(row.position, row.payload_bytes))
        start = row.position - extents[-1].position
        slices[index] = Slice(len(files) - 1, len(extents) - 1, start, start + row.payload_bytes)
    return ReadPieces(files, [each for each in slices if each is not None])
