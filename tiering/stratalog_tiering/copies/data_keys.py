"""Wrapped data keys of segments, between two copies of a bucket: copied, or read for a repair, and verified."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from stratalog_core.errors import Conflict, Corrupt, StorageFailed
from stratalog_tiering.cold.manifest_source import ManifestSource, unwrapped
from stratalog_tiering.cold.segment_check import check_segment, require_sound
from stratalog_tiering.cold.verifier import READS_AT_ONCE
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.format.descriptor import WrappedDataKey, decode_descriptor
from stratalog_tiering.format.footer import SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.store import ObjectStore, StoreWithCopy


async def copy_data_key(
    first: ObjectStore, second: ObjectStore, footer: SegmentFooter, confirm: Callable[[], Awaitable[None]]
) -> None:
    """Copy the data key of a segment, unless it is there, and once more if it was wrapped anew meanwhile.

    A rotation wraps what it finds in ``first``, and then what it finds in ``second``: perhaps not this copy. ``confirm`` is
    awaited before that is replaced. Raises ``Corrupt`` or ``NoSuchObject``, having copied nothing damaged, ``Invalid`` for a
    newer format, ``Unavailable``, ``OutcomeUnknown``, and what ``confirm`` raises.
    """
    copied: bytes | None = None
    while (content := await first.get(footer.data_key)) != copied:
        with suppress(StorageFailed):  # Without its key nothing tells whether it is sound.
            await unwrapped(first.keys, content, footer)
        if copied is not None:
            await confirm()
        with suppress(Conflict):
            await second.put(footer.data_key, [content], if_absent=copied is None)
        copied = content


async def data_key_in_copy(
    store: ObjectStore, copy: ObjectStore, entry: SegmentEntry, footer: SegmentFooter, limits: CopyLimits
) -> bytes:
    """The copy's wrapped data key of a segment. It decrypts the copy's segment or, if that is damaged, the one in ``store``.

    Raises ``Corrupt``, ``NoSuchObject``, ``StorageFailed`` if the key ring does not have its key, ``Unavailable``.
    """
    source, at_once = ManifestSource(copy), READS_AT_ONCE
    cipher = await source.cipher(footer)
    content = await copy.get(footer.data_key)
    decode_descriptor(content, WrappedDataKey, footer.data_key)
    if cipher is None:
        return content
    try:
        await require_sound(copy, source, entry, limits.background, reads_at_once=at_once)
    except Corrupt:
        either = ManifestSource(StoreWithCopy(copy, store, limits.clock))
        async for finding in check_segment(store, either, entry, limits.background, reads_at_once=at_once):
            raise Corrupt(f"with the copy's data key the segment does not verify: {finding}", key=entry.key) from None
    return content
