"""Manifests, pages and footers from the store: verified against their digests and cached; they never change.

Concurrent loads of one object share one read. An object that is missing although a committed manifest refers to it is
``Corrupt``, never "not found": the caller must not take it for the end of the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.errors import Corrupt, NoSuchObject, StorageFailed
from stratalog_core.ports import Background, Buffer
from stratalog_core.single_flight import SingleFlight
from stratalog_core.stepwise import AT_ONCE_BYTES
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.cold.whole_objects import check_size, ends_object
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.block_cipher import BlockCipher, data_key_context
from stratalog_tiering.format.descriptor import WrappedDataKey, decode_descriptor
from stratalog_tiering.format.erased_leaves import ErasedLeaf, parse_erased
from stratalog_tiering.format.footer import (
    ERASED,
    PRODUCERS,
    SegmentFooter,
    check_section,
    parse_footer,
    parse_producers,
)
from stratalog_tiering.format.lookup import (
    live_segments,
    locate,
    locate_in_page,
    reaching_timestamp,
    reaching_timestamp_in_page,
)
from stratalog_tiering.format.manifest import (
    Manifest,
    ManifestPage,
    PageRef,
    RemovedList,
    RemovedListRef,
    RemovedObject,
    SegmentEntry,
    decode_manifest,
    decode_page,
    decode_removed_list,
)
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.partition_tree import TreePage, TreePageRef, decode_tree_page
from stratalog_tiering.store import KeyRing, ObjectStore, read_verified

_Parsed = TypeVar("_Parsed")
Found = tuple[SegmentEntry, SegmentFooter]
MEMORY_BYTES: Final = 64 * 1024 * 1024
_CIPHERS_MAX: Final = 4096
_SEGMENT_ENTRY_BYTES: Final = 1024
"""Estimated memory of one ``SegmentEntry`` with its strings, digests and numbers."""
_ENTRY_BYTES: Final = 512
"""The same for every other entry: a page, removed object, block or leader epoch."""


class ManifestSource:
    """Looks up segments and footers: at most two GETs from a pointer to a segment, one more to its footer."""

    def __init__(self, store: ObjectStore, memory_bytes: int = MEMORY_BYTES, background: Background | None = None) -> None:
        """Objects large enough to block the event loop are parsed in ``background``, if there is one."""
        self._store = store
        self._background = background
        self._manifest_loads: SingleFlight[tuple[str, bytes], Manifest] = SingleFlight()
        self._page_loads: SingleFlight[str, ManifestPage] = SingleFlight()
        self._footer_loads: SingleFlight[tuple[str, int], SegmentFooter] = SingleFlight()
        self._manifests: LruCache[tuple[str, bytes], Manifest] = LruCache(memory_bytes // 4, _manifest_bytes)
        self._pages: LruCache[str, ManifestPage] = LruCache(
            memory_bytes // 4, lambda page: len(page.segments) * _SEGMENT_ENTRY_BYTES
        )
        self._footers: LruCache[tuple[str, int], SegmentFooter] = LruCache(memory_bytes // 2, _footer_bytes)
        self._cipher_loads: SingleFlight[str, BlockCipher] = SingleFlight()
        self._ciphers: LruCache[str, BlockCipher] = LruCache(_CIPHERS_MAX, lambda _: 1)

    async def manifest(self, pointer: ManifestPointer) -> Manifest:
        """The manifest that ``pointer`` names, or contains. Raises ``Corrupt``, ``Unavailable``."""
        sha256 = bytes.fromhex(pointer.sha256)
        if pointer.content and self._manifests.get((pointer.object_key, sha256)) is None:
            self.remember(pointer.object_key, sha256, decode_manifest(pointer.content, sha256))
        return await self.manifest_at(pointer.object_key, sha256)

    async def manifest_at(self, key: str, sha256: bytes) -> Manifest:
        cached = self._manifests.get((key, sha256))
        if cached is not None:
            return cached
        return await self._manifest_loads.get((key, sha256), lambda: self._load_manifest(key, sha256))

    def remember(self, key: str, sha256: bytes, manifest: Manifest) -> None:
        """Cache a manifest that the caller has verified."""
        self._manifests.put((key, sha256), manifest)

    async def _load_manifest(self, key: str, sha256: bytes) -> Manifest:
        manifest = await self._verified(key, "manifest", lambda content: decode_manifest(content, sha256))
        self.remember(key, sha256, manifest)
        return manifest

    async def page(self, ref: PageRef) -> ManifestPage:
        cached = self._pages.get(ref.key)
        return cached if cached is not None else await self._page_loads.get(ref.key, lambda: self._load_page(ref))

    async def _load_page(self, ref: PageRef) -> ManifestPage:
        page = await self._verified(ref.key, "manifest page", lambda content: decode_page(content, ref.sha256))
        self._pages.put(ref.key, page)
        return page

    async def pages(self, refs: Sequence[PageRef]) -> dict[str, ManifestPage]:
        return {ref.key: await self.page(ref) for ref in refs}

    async def removed_list(self, ref: RemovedListRef) -> RemovedList:
        """A list of removed objects, uncached: only workers read lists, and rarely."""
        return await self._verified(
            ref.key, "list of removed objects", lambda content: decode_removed_list(content, ref.sha256)
        )

    async def removed_lists(self, refs: Sequence[RemovedListRef]) -> dict[str, RemovedList]:
        return {ref.key: await self.removed_list(ref) for ref in refs}

    async def tree_pages(self, refs: Sequence[TreePageRef]) -> dict[str, TreePage]:
        """Pages of the partition's Merkle tree, uncached: only proofs and rare edits read them. Raises ``Corrupt``."""
        return {ref.key: await self.tree_page(ref) for ref in refs}

    async def tree_page(self, ref: TreePageRef) -> TreePage:
        return await self._verified(ref.key, "tree page", lambda content: decode_tree_page(content, ref.sha256))

    async def removed(self, manifest: Manifest) -> AsyncIterator[RemovedObject]:
        """All removed objects that are not yet deleted, in the order of their removal."""
        for ref in manifest.removed_lists:
            for removed in (await self.removed_list(ref)).objects[ref.deleted_count :]:
                yield removed
        for removed in manifest.removed:
            yield removed

    async def segments(self, manifest: Manifest) -> AsyncIterator[SegmentEntry]:
        """All live segments in offset order."""
        for ref in manifest.pages:
            for entry in live_segments(manifest, await self.page(ref)):
                yield entry
        for entry in manifest.segments:
            yield entry

    async def segment_at(self, manifest: Manifest, offset: int) -> SegmentEntry | None:
        """The segment that holds ``offset``; None outside the manifest."""
        found = locate(manifest, offset)
        return locate_in_page(await self.page(found), offset) if isinstance(found, PageRef) else found

    async def segment_reaching(self, manifest: Manifest, timestamp_ms: int, from_offset: int) -> SegmentEntry | None:
        """The first segment that ends beyond ``from_offset`` and has a record at ``timestamp_ms`` or later, or None."""
        from_offset = max(from_offset, manifest.start_offset)
        while isinstance(found := reaching_timestamp(manifest, timestamp_ms, from_offset), PageRef):
            inside = reaching_timestamp_in_page(await self.page(found), timestamp_ms, from_offset)
            if inside is not None:
                return inside
            from_offset = found.end_offset
        return found

    def cached(self, pointer: ManifestPointer, offset: int) -> Found | None:
        """Segment and footer of ``offset`` if the whole lookup is cached, else None."""
        manifest = self._manifests.get((pointer.object_key, bytes.fromhex(pointer.sha256)))
        found = locate(manifest, offset) if manifest is not None else None
        if isinstance(found, PageRef):
            page = self._pages.get(found.key)
            found = locate_in_page(page, offset) if page is not None else None
        footer = self._footers.get(_place(found)) if found is not None else None
        return (found, footer) if found is not None and footer is not None else None

    async def find(self, pointer: ManifestPointer, offset: int) -> Found:
        """Segment and footer of an offset that ``pointer`` covers. Raises ``Corrupt``, ``Unavailable``."""
        entry = await self.segment_at(await self.manifest(pointer), offset)
        if entry is None:
            raise Corrupt(f"manifest {pointer.object_key} does not cover offset {offset}, but its pointer does")
        return entry, await self.footer(entry)

    async def footer(self, entry: SegmentEntry) -> SegmentFooter:
        """The segment's footer, verified against the manifest. Raises ``Corrupt``, ``Unavailable``."""
        cached = self._footers.get(_place(entry))
        return cached if cached is not None else await self._footer_loads.get(_place(entry), lambda: self._load_footer(entry))

    async def _load_footer(self, entry: SegmentEntry) -> SegmentFooter:
        footer = await self.read_footer(entry)
        self._footers.put(_place(entry), footer)
        return footer

    async def read_footer(self, entry: SegmentEntry) -> SegmentFooter:
        """The same, read from the store and not from the cache."""
        position, length = entry.footer_position, entry.footer_bytes
        return await self._verified_range(entry, position, length, lambda tail: _committed_footer(entry, tail))

    async def read_tail(self, entry: SegmentEntry) -> tuple[SegmentFooter, memoryview]:
        """The footer, with all bytes behind the blocks, read together from the store; the sections are verified, too.

        So is the object's size, if the object ends with the segment.
        """
        begin = entry.data_position + entry.data_bytes
        length = entry.footer_position + entry.footer_bytes - begin
        one_more = 1 if ends_object(entry) else 0

        def parse(tail: memoryview) -> tuple[SegmentFooter, memoryview]:
            if one_more:
                check_size(entry, begin + len(tail))
            footer = _committed_footer(entry, tail[entry.footer_position - begin :])
            for section in footer.sections:
                start = section.position - entry.data_bytes
                check_section(tail[start : start + section.length], section)
            return footer, tail

        return await self._verified_range(entry, begin, length + one_more, parse, or_less=bool(one_more))

    async def producers(self, entry: SegmentEntry) -> tuple[ProducerEntry, ...]:
        """The producers' states at the segment's end, uncached: only a takeover and a merge need them. Raises ``Corrupt``."""
        section = (await self.footer(entry)).section(PRODUCERS)
        if section is None:
            return ()
        position = entry.data_position + section.position
        return await self._verified_range(entry, position, section.length, lambda content: parse_producers(content, section))

    async def erased_leaves(self, entry: SegmentEntry) -> tuple[ErasedLeaf, ...]:
        """The leaves of batches of an erased segment that lost records; none of any other segment. Raises ``Corrupt``."""
        section = (await self.footer(entry)).section(ERASED) if entry.is_erased else None
        if section is None:
            return ()
        position = entry.data_position + section.position
        return await self._verified_range(entry, position, section.length, lambda content: parse_erased(content, section))

    async def cipher(self, footer: SegmentFooter) -> BlockCipher | None:
        """The cipher of the segment's blocks; None if they are not encrypted.

        Raises ``Corrupt`` if the data key is lost, ``StorageFailed`` that names the key which the key ring does not have,
        ``Unavailable``.
        """
        if not footer.is_encrypted:
            return None
        cached = self._ciphers.get(footer.data_key)
        return (
            cached if cached is not None else await self._cipher_loads.get(footer.data_key, lambda: self._load_cipher(footer))
        )

    async def check_data_key(self, footer: SegmentFooter) -> None:
        """Read the data key of a segment that is encrypted again from the store. Raises as :meth:`cipher`."""
        if footer.is_encrypted:
            await read_verified(self._store, lambda store: _data_key(store, footer))

    async def _load_cipher(self, footer: SegmentFooter) -> BlockCipher:
        cipher = BlockCipher(await read_verified(self._store, lambda store: _data_key(store, footer)))
        self._ciphers.put(footer.data_key, cipher)
        return cipher

    async def _verified_range(
        self,
        entry: SegmentEntry,
        position: int,
        length: int,
        parse: Callable[[memoryview], _Parsed],
        *,
        or_less: bool = False,
    ) -> _Parsed:
        """The result of ``parse`` for a range of the segment's object. It raises ``Corrupt`` if the bytes are wrong."""

        async def read(store: ObjectStore) -> _Parsed:
            try:
                content = await store.get_range(entry.key, position, length, or_less=or_less)
            except NoSuchObject as gone:
                raise Corrupt(f"segment {entry.key} is missing from {store.url}", key=entry.key) from gone
            except Corrupt as shorter:
                raise Corrupt(shorter.message, key=entry.key, damage=Damage.SEGMENT_SIZE.value) from shorter
            return await self._parsed(entry.key, content, lambda: parse(content))

        return await read_verified(self._store, read)

    async def _verified(self, key: str, kind: str, parse: Callable[[bytes], _Parsed]) -> _Parsed:
        """The result of ``parse`` for a whole object, as in `_verified_range`."""

        async def read(store: ObjectStore) -> _Parsed:
            try:
                content = await store.get(key)
            except NoSuchObject as gone:
                raise Corrupt(f"{kind} {key} is missing from {store.url}", key=key) from gone
            return await self._parsed(key, content, lambda: parse(content))

        return await read_verified(self._store, read)

    async def _parsed(self, key: str, content: Buffer, parse: Callable[[], _Parsed]) -> _Parsed:
        """The result of ``parse``, run in the background if ``content`` is large. ``Corrupt`` errors name the object."""
        if self._background is None or len(content) <= AT_ONCE_BYTES:
            return _named(key, parse)
        return await self._background.run(lambda: _named(key, parse))


async def _data_key(store: ObjectStore, footer: SegmentFooter) -> bytes:
    """The segment's data key, unwrapped. Raises as :meth:`ManifestSource.cipher`."""
    key = footer.data_key
    try:
        content = await store.get(key)
    except NoSuchObject as gone:
        problem = f"data key {key} is missing from {store.url}: its segment cannot be decrypted"
        raise Corrupt(problem, key=key, damage="data-key-missing") from gone
    return await unwrapped(store.keys, content, footer)


async def unwrapped(keys: KeyRing, content: bytes, footer: SegmentFooter) -> bytes:
    """The data key in the object ``content``. Raises as :meth:`ManifestSource.cipher`, ``Invalid``."""
    key = footer.data_key
    try:
        wrapped = decode_descriptor(content, WrappedDataKey, key)
        if (wrapped.topic_id, wrapped.partition) != (footer.topic_id, footer.partition):
            raise Corrupt(f"it belongs to {wrapped.topic_id}-{wrapped.partition}, not to {footer.topic_id}-{footer.partition}")
        context = data_key_context(footer.topic_id, footer.partition)
        return await keys.unwrap(wrapped.key_name, wrapped.wrapped, context)
    except Corrupt as bad:
        raise Corrupt(f"{key}: {bad.message}", key=key, damage="data-key-altered") from bad
    except StorageFailed as unknown:
        # Perhaps the name of its key is altered: nothing else shows that.
        raise StorageFailed(f"data key {key} cannot be unwrapped: {unknown.message}", key=key) from unknown


def _place(entry: SegmentEntry) -> tuple[str, int]:
    """The key of a segment in the caches: an object may hold several segments."""
    return entry.key, entry.footer_position


def _manifest_bytes(manifest: Manifest) -> int:
    entries = 1 + len(manifest.pages) + len(manifest.removed) + len(manifest.tree.pages) + len(manifest.tree.spans)
    return entries * _ENTRY_BYTES + len(manifest.segments) * _SEGMENT_ENTRY_BYTES


def _footer_bytes(footer: SegmentFooter) -> int:
    return _ENTRY_BYTES * (
        1 + len(footer.blocks) + len(footer.leader_epochs) + len(footer.aborted_transactions) + len(footer.sections)
    )


def _committed_footer(entry: SegmentEntry, footer: memoryview) -> SegmentFooter:
    if object_sha256(footer) != entry.footer_sha256:
        raise Corrupt("the footer is not the committed one: its SHA-256 differs")
    return parse_footer(footer, entry.stored_bytes)


def _named(key: str, parse: Callable[[], _Parsed]) -> _Parsed:
    """The result of ``parse``. ``Corrupt`` errors name the object."""
    try:
        return parse()
    except Corrupt as bad:
        raise Corrupt(f"{key}: {bad.message}", **{**bad.detail, "key": key}) from bad
