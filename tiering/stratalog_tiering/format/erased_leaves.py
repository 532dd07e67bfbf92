"""The section ``erased`` of a segment: the Merkle leaves of batches that lost records by an erasure.

An erased segment still has every batch, and so as many leaves as before. The leaf of a batch that was altered cannot be
computed any more, so the section keeps it. The others are computed from the batches, which proves that these are what they
were. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_tiering.format.footer import SectionEntry, check_section
from stratalog_tiering.format.merkle import HASH_BYTES


class ErasedLeaf(msgspec.Struct, frozen=True, array_like=True):
    """The leaf of the segment's batch number ``index``, as the batch was before records of it were erased."""

    index: int
    leaf: bytes


class _ErasedSection(msgspec.Struct, frozen=True):
    leaves: tuple[ErasedLeaf, ...]


def encode_erased(leaves: Sequence[ErasedLeaf]) -> bytes:
    """The section's bytes. ``leaves`` are in the order of their batches."""
    return msgspec.msgpack.encode(_ErasedSection(tuple(leaves)))


def parse_erased(content: Buffer, entry: SectionEntry) -> tuple[ErasedLeaf, ...]:
    """The leaves in their section. Raises ``Corrupt``."""
    check_section(content, entry)
    try:
        leaves = msgspec.msgpack.decode(content, type=_ErasedSection).leaves
    except MALFORMED as bad:
        raise Corrupt(f"section {entry.name!r} at byte {entry.position} cannot be decoded: {bad}") from bad
    indexes = [-1, *(each.index for each in leaves)]
    if indexes != sorted(set(indexes)) or any(len(each.leaf) != HASH_BYTES for each in leaves):
        raise Corrupt(f"section {entry.name!r} at byte {entry.position} has leaves out of order or of another size")
    return leaves


def restore_leaves(leaves: bytearray, erased: Sequence[ErasedLeaf]) -> None:
    """Put erased leaves in the place of those that were computed from the altered batches. Raises ``Corrupt``."""
    for each in erased:
        if (each.index + 1) * HASH_BYTES > len(leaves):
            raise Corrupt(f"an erased leaf is of batch {each.index}; the segment has {len(leaves) // HASH_BYTES}")
        leaves[each.index * HASH_BYTES : (each.index + 1) * HASH_BYTES] = each.leaf
