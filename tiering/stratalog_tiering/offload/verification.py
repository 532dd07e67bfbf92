"""Verifies a new segment in the store before it is committed, as ``[tiering] verify`` says.

``read`` reads all of it back. ``checksum`` compares size and CRC32C that the store reports with those of the bytes that were
sent. That proves that the store received them, not that it can return them, and finds no damage from before they were sent.
A segment whose checksum the store does not report is read back.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Corrupt, NoSuchObject
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.cold.whole_objects import check_size
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.offload.ports import WorkerPorts

BY_CHECKSUM: Final = "checksum"


async def verify_new(ports: WorkerPorts, entry: SegmentEntry, crc32c: str) -> None:
    """Return once the segment is verified. ``crc32c`` is the checksum of what was sent, empty if it is not known.

    Raises ``Corrupt`` with the first finding, ``Unavailable``.
    """
    if ports.settings.verify == BY_CHECKSUM and await _matches(ports, entry, crc32c):
        return
    await require_sound(
        ports.store, ports.source, entry, ports.background,
        reads_at_once=ports.settings.verify_reads_at_once, take=ports.verifying.take,
    )  # fmt: skip


async def _matches(ports: WorkerPorts, entry: SegmentEntry, crc32c: str) -> bool:
    """Whether the store reports the checksum; False if either is unknown, or one is of the object and one of its parts.

    Raises ``Corrupt`` if they differ.
    """
    try:
        info = await ports.store.head(entry.key)
    except NoSuchObject as gone:
        raise Corrupt(f"segment {entry.key} is missing from {ports.store.url}", key=entry.key) from gone
    check_size(entry, info.size_bytes)
    if not crc32c or not info.crc32c or ("-" in crc32c) != ("-" in info.crc32c):
        return False
    if info.crc32c != crc32c:
        raise Corrupt(
            f"the copy of {entry.key} in {ports.store.url} has CRC32C {info.crc32c}, sent was {crc32c}", key=entry.key
        )
    return True
