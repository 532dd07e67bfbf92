"""Extents: the parts of log files to read for a request, and where its entries are in them.

Entries of several ledgers interleave in the log. Neighbours with a small gap are read as one extent. A large request is read
directly, all extents in parallel: a third of the CPU of reading through the page cache (measured), which copies every byte and,
if the log was written around it, has to allocate every page first. A small or scattered request goes through the page cache,
where the kernel reads ahead. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_bookies.disk.core.lookup import Place
from stratalog_core.ports import Extent

GAP_BYTES_MAX: Final = 32 * 1024
"""Maximum gap between two entries that is read and discarded: a read of its own costs as much."""
WASTED_SHARE_MAX: Final = 0.5
EXTENTS_MAX: Final = 32


class FilePieces(NamedTuple):
    """Extents of one log file, ascending."""

    generation: int
    extents: list[Extent]


class Slice(NamedTuple):
    """An entry's payload: the file and extent (both by index), and the byte range in that extent."""

    file: int
    piece: int
    start: int
    end: int


class ReadPieces(NamedTuple):
    """``slices`` are in the order of the places."""

    files: list[FilePieces]
    slices: list[Slice]


def pieces_of(places: Sequence[Place], bytes_min: int) -> ReadPieces | None:
    """The extents to read around the page cache for these entries; None if the page cache serves them better.

    The page cache serves requests of less than ``bytes_min`` of payload, of more than ``EXTENTS_MAX`` extents, and those for
    which most of the bytes read would belong to other entries.
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
