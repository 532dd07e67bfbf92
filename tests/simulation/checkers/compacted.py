"""Checks a compacted topic's cold history at every commit, from the objects in the bucket alone.

The truth is what the owner appended. The checker decodes with the plain decoder, and shares nothing with the compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from simulation.world.object_store import Bucket
from stratalog_core.batches.batch import check_batch
from stratalog_core.batches.records import iterate_records
from stratalog_core.ports import Buffer
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, decode_manifest, decode_page
from stratalog_tiering.format.segment import iterate_block_batches, parse_footer, plain_block

Require = Callable[[bool, str], None]
_NOTHING: Final[Mapping[int, bytes | None]] = {}


class Written(NamedTuple):
    """A record as it was appended. Markers have no key and are not committed."""

    offset: int
    key: bytes | None
    value: bytes | None
    is_committed: bool
    expires_ms: int | None = None
    """Wall time from which the record counts as a tombstone."""


class CompactedHistory:
    """One partition. ``now_ms`` is wall time."""

    def __init__(self, require: Require, bucket: Bucket, now_ms: Callable[[], int], delete_retention_ms: int) -> None:
        self._require = require
        self._bucket = bucket
        self._now_ms = now_ms
        self._delete_retention_ms = delete_retention_ms
        self._offered: dict[int, list[Written]] = {}
        self.records: dict[int, Written] = {}
        """The appended records, by offset."""
        self.present: Mapping[int, bytes | None] = _NOTHING
        """The values of the records, by offset, that the last committed version holds."""
        self.passes_ms: set[int] = set()
        """When passes began: delete horizons count from there, however long a pass takes, as in Apache Kafka."""
        self._horizons_ms: dict[int, int] = {}
        """The delete horizon with which each tombstone, and each record that expires, was in a compacted segment first."""
        self._known: set[str] = set()
        self._clean_end = 0
        self.compacted_segments = self.deleted_tombstones = self.expired_records = 0

    @property
    def end_offset(self) -> int:
        return max(self.records, default=-1) + 1

    def offer(self, ledger_id: int, written: list[Written]) -> None:
        """Note the records of a ledger, which may be committed."""
        self._offered[ledger_id] = written

    def appended(self, ledger_id: int) -> None:
        self.records.update((each.offset, each) for each in self._offered.pop(ledger_id, ()))

    def check(self, pointer: ManifestPointer) -> None:
        """Check the version that was just committed."""
        manifest = decode_manifest(self._bucket.manifest_content(pointer))
        segments = self._segments(manifest)
        present, clean_end = dict[int, bytes | None](), manifest.start_offset
        is_clean = True
        for entry in segments:
            found = self._content(entry)
            self._check_content(entry, found)
            present.update(found)
            is_clean = is_clean and entry.is_compacted
            if is_clean:
                clean_end = entry.end_offset if entry.options.dirty_from is None else entry.options.dirty_from
                is_clean = entry.options.dirty_from is None
            self._note_compacted(entry)
        self._check_survivors(present, pointer.end_offset)
        self._check_clean(present, clean_end)
        self.present, self._clean_end = present, clean_end

    def require_compacted(self) -> None:
        """Require that everything is compacted, and every tombstone gone whose time is over."""
        self._require(self._clean_end == self.end_offset, f"compacted up to {self._clean_end}, not to {self.end_offset}")
        self._require(self.compacted_segments > 0, "nothing was compacted")

    def read(self, batches: Iterable[Buffer], from_offset: int) -> dict[int, bytes | None]:
        """The values of the keyed records from an offset on."""
        return {
            record.offset: record.value
            for batch in batches
            if not check_batch(batch).is_control
            for record in iterate_records(batch)
            if record.offset >= from_offset
        }

    def _segments(self, manifest: Manifest) -> Sequence[SegmentEntry]:
        pages = [decode_page(self._bucket.objects[ref.key][0], ref.sha256) for ref in manifest.pages]
        return [*(entry for page in pages for entry in live_segments(manifest, page)), *manifest.segments]

    def _batches(self, entry: SegmentEntry) -> list[Buffer]:
        content = self._bucket.objects[entry.key][0]
        footer = parse_footer(content, len(content))
        blocks = (plain_block(content[block.position : block.end_position], block) for block in footer.blocks)
        return [batch for block in blocks for batch, _ in iterate_block_batches(block)]

    def _content(self, entry: SegmentEntry) -> dict[int, bytes | None]:
        batches = self._batches(entry)
        last = check_batch(batches[-1])
        self._require(last.next_offset == entry.end_offset, f"{entry.key} does not end with a batch")
        return self.read(batches, 0)

    def _check_content(self, entry: SegmentEntry, found: Mapping[int, bytes | None]) -> None:
        for offset, value in found.items():
            written = self.records.get(offset)
            is_same = written is not None and written.value == value and written.key is not None
            self._require(is_same, f"offset {offset} holds {value!r}, not {written}")
            # `job compact` leaves such records to the workers.
            may_be_aborted = not entry.is_compacted or entry.options.dirty_from == entry.base_offset
            is_kept = written is not None and (written.is_committed or may_be_aborted)
            self._require(is_kept, f"compacted segment {entry.key} holds offset {offset} of an aborted transaction")

    def _note_compacted(self, entry: SegmentEntry) -> None:
        if not entry.is_compacted or entry.key in self._known:
            return
        self.compacted_segments += 1
        self._known.add(entry.key)
        for batch in self._batches(entry):
            horizon_ms = check_batch(batch).delete_horizon_ms
            if horizon_ms is not None:
                for offset, value in self.read([batch], 0).items():
                    if value is None or self.records[offset].expires_ms is not None:
                        self._check_horizon(offset, horizon_ms)

    def _check_horizon(self, offset: int, horizon_ms: int) -> None:
        first_ms = self._horizons_ms.setdefault(offset, horizon_ms)
        self._require(horizon_ms == first_ms, f"the delete horizon of offset {offset} moved from {first_ms} to {horizon_ms}")
        is_of_a_pass = horizon_ms - self._delete_retention_ms in self.passes_ms
        self._require(is_of_a_pass, f"the delete horizon of offset {offset}, {horizon_ms}, counts from the start of no pass")

    def _check_survivors(self, present: Mapping[int, bytes | None], end_offset: int) -> None:
        newest: dict[bytes, Written] = {}
        for offset in range(end_offset):
            written = self.records[offset]
            if written.key is not None and written.is_committed:
                newest[written.key] = written
        for key, written in newest.items():
            if written.offset in present:
                continue
            is_expired = written.expires_ms is not None and written.expires_ms <= self._now_ms()
            may_go = written.value is None or is_expired
            self._require(may_go, f"the newest record of {key!r}, at offset {written.offset}, is lost")
            if may_go:
                self._check_deleted(key, written)

    def _check_deleted(self, key: bytes, written: Written) -> None:
        """A tombstone may go when the delete horizon that an earlier commit gave it is over."""
        offset = written.offset
        horizon_ms = self._horizons_ms.get(offset)
        self._require(horizon_ms is not None, f"the tombstone of {key!r} at offset {offset} went in its first compaction")
        if horizon_ms is None or offset not in self.present:
            return
        self.deleted_tombstones += 1
        self.expired_records += written.value is not None
        early_ms = horizon_ms - self._now_ms()
        self._require(early_ms <= 0, f"the tombstone of {key!r} at offset {offset} was deleted {early_ms} ms too early")

    def _check_clean(self, present: Mapping[int, bytes | None], clean_end: int) -> None:
        seen: dict[bytes, int] = {}
        for offset in sorted(present):
            key = self.records[offset].key
            if offset < clean_end and key is not None:
                self._require(key not in seen, f"{key!r} is at offsets {seen.get(key)} and {offset} of what is compacted")
                seen[key] = offset
