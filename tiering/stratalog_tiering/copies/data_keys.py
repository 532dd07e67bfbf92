"""Reads the wrapped data key of a segment from another copy of the bucket, for a repair, and verifies it."""

from __future__ import annotations

from stratalog_core.errors import Corrupt
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import check_segment, require_sound
from stratalog_tiering.cold.verifier import READS_AT_ONCE
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.format.descriptor import WrappedDataKey, decode_descriptor
from stratalog_tiering.format.footer import SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.store import ObjectStore, StoreWithCopy


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
