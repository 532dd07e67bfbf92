"""Manifests: look-ups equal a linear scan, edits keep the history contiguous, the root stays small, chains are checked."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from uuid import UUID

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from support.segment_entries import entry_of, leaves_of

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt, Invalid
from stratalog_tiering.format.footer import Signature
from stratalog_tiering.format.lookup import (
    live_segments,
    locate,
    locate_in_page,
    reaching_timestamp,
    reaching_timestamp_in_page,
)
from stratalog_tiering.format.manifest import (
    MANIFEST_MAGIC,
    ManifestPage,
    PageRef,
    PresentBatches,
    RemovedList,
    RemovedListRef,
    RemovedObject,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    decode_manifest,
    decode_page,
    decode_removed_list,
    empty_manifest,
    encode_manifest,
)
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous, Removal
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.manifest_writers import WRITER_VERSION
from stratalog_tiering.format.merkle import root_hash, split_hashes
from stratalog_tiering.format.object_frame import FORMAT_VERSION
from stratalog_tiering.format.partition_tree import TreePage, TreePageRef, decode_tree_page

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")
LIMITS = ManifestLimits(inline_segments_max=4, page_segments=2, page_fan_in=3, inline_removed_max=3, inline_spans_max=2)


def entry(base: int, end: int, timestamp: int = 0, records: int | None = None, name: str = "") -> SegmentEntry:
    return entry_of(
        f"segments/{TOPIC.hex}/0/{base}{name}", base, end, record_count=end - base if records is None else records,
        max_timestamp_ms=timestamp, leader_epochs=(EpochStart(epoch=1, start_offset=base),), created_at_ms=9,
    )  # fmt: skip


class History:
    """Drives edits as a worker does, with a dictionary for the store, and keeps the plain list that must come out."""

    def __init__(self, base: int = 0, limits: ManifestLimits = LIMITS) -> None:
        counter = itertools.count(1)
        self.random_id: Callable[[], int] = lambda: next(counter)
        self.limits = limits
        self.previous = Previous(manifest=empty_manifest(TOPIC, "flights", 0, base))
        self.stored: dict[str, bytes] = {}
        self.expected: list[SegmentEntry] = []
        self.removed: list[str] = []
        """Keys of removed objects that are not deleted yet, in the order of their removal."""
        self.leaves: list[bytes] = []
        """Every leaf that was ever appended."""
        self.now_ms = 50

    def edit(self) -> ManifestEdit:
        return ManifestEdit(self.previous, writer="worker", random_id=self.random_id, limits=self.limits)

    def load(self, refs: tuple[PageRef, ...]) -> dict[str, ManifestPage]:
        return {ref.key: decode_page(self.stored[ref.key], ref.sha256) for ref in refs}

    def load_lists(self, refs: tuple[RemovedListRef, ...]) -> dict[str, RemovedList]:
        return {ref.key: decode_removed_list(self.stored[ref.key], ref.sha256) for ref in refs}

    def load_tree(self, refs: Sequence[TreePageRef]) -> dict[str, TreePage]:
        return {ref.key: decode_tree_page(self.stored[ref.key], ref.sha256) for ref in refs}

    def removed_objects(self) -> list[RemovedObject]:
        manifest = self.previous.manifest
        lists = self.load_lists(manifest.removed_lists)
        listed = [removed for ref in manifest.removed_lists for removed in lists[ref.key].objects[ref.deleted_count :]]
        return [*listed, *manifest.removed]

    def delete_due(self, before_ms: int, limit: int) -> tuple[str, ...]:
        edit = self.edit()
        gone = edit.forget_due(before_ms, limit, self.load_lists(edit.lists_due(before_ms, limit)))
        if edit.is_changed:
            self.commit(edit)
        for key in gone:
            self.stored.pop(key, None)
        return gone

    def commit(self, edit: ManifestEdit) -> None:
        lists = self.load_lists(edit.lists_to_merge())
        tree_pages = self.load_tree(edit.tree_pages_to_merge())
        new = edit.finish(created_at_ms=max(77, self.now_ms), lists=lists, tree_pages=tree_pages)
        for key, content in (*new.parts, (new.key, new.content)):
            assert key not in self.stored
            self.stored[key] = content
        self.previous = Previous(manifest=decode_manifest(new.content, new.sha256), key=new.key, sha256=new.sha256)

    def append(self, *entries: SegmentEntry) -> None:
        edit = self.edit()
        added = [edit.append(entry, leaves_of(entry)) for entry in entries]
        edit.move_to_pages(self.load(edit.pages_to_merge()))
        self.commit(edit)
        self.expected.extend(added)
        self.leaves += [leaf for entry in entries for leaf in split_hashes(leaves_of(entry))]

    def drop(self, below: int) -> None:
        edit = self.edit()
        dropped = edit.drop_below(below, lambda _: Removal(reason="expired"), self.load(edit.pages_for_drop(below)))
        self.commit(edit)
        assert list(dropped) == [kept for kept in self.expected if kept.end_offset <= below]
        self.expected = [kept for kept in self.expected if kept.end_offset > below]

    def segments(self) -> list[SegmentEntry]:
        found: list[SegmentEntry] = []
        for ref in self.previous.manifest.pages:
            found.extend(live_segments(self.previous.manifest, self.load((ref,))[ref.key]))
        return [*found, *self.previous.manifest.segments]

    def check(self) -> None:
        manifest = self.previous.manifest
        assert self.segments() == self.expected
        assert manifest.cold_bytes == sum(kept.stored_bytes for kept in self.expected)
        assert (manifest.tree.size, manifest.tree.head) == (len(self.leaves), root_hash(self.leaves))
        assert manifest.record_count == sum(kept.record_count for kept in self.expected)

    def find(self, offset: int) -> SegmentEntry | None:
        found = locate(self.previous.manifest, offset)
        if isinstance(found, PageRef):
            return locate_in_page(self.load((found,))[found.key], offset)
        return found

    def find_time(self, timestamp: int, start: int) -> SegmentEntry | None:
        while True:
            found = reaching_timestamp(self.previous.manifest, timestamp, start)
            if not isinstance(found, PageRef):
                return found
            start = max(start, found.base_offset)
            inside = reaching_timestamp_in_page(self.load((found,))[found.key], timestamp, start)
            if inside is not None:
                return inside
            start = found.end_offset


def grown(sizes: list[int], timestamps: list[int], base: int = 10) -> History:
    history, offset = History(base), base
    for size, timestamp in zip(sizes, timestamps, strict=False):
        history.append(entry(offset, offset + size, timestamp))
        offset += size
    return history


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=40), st.data())
def test_lookups_equal_a_linear_scan(shape: list[tuple[int, int]], data: st.DataObject) -> None:
    history = grown([size for size, _ in shape], [time for _, time in shape])
    end = history.previous.manifest.end_offset
    history.drop(data.draw(st.integers(0, end + 2)))
    history.check()
    for offset in range(8, end + 3):
        assert history.find(offset) == next((e for e in history.expected if e.base_offset <= offset < e.end_offset), None)
    for timestamp, start in itertools.product(range(0, 32, 5), range(8, end + 3, 7)):
        wanted = (e for e in history.expected if e.max_timestamp_ms >= timestamp and e.end_offset > start)
        assert history.find_time(timestamp, start) == next(wanted, None)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["append", "append", "append", "drop", "merge"]), st.integers(1, 6)), max_size=40))
def test_edits_keep_the_history_contiguous(steps: list[tuple[str, int]]) -> None:
    history = History()
    for kind, size in steps:
        end = history.previous.manifest.end_offset
        if kind == "append":
            history.append(*(entry(end + i * 3, end + i * 3 + 3, size) for i in range(size)))
        elif kind == "drop":
            history.drop(history.previous.manifest.start_offset + size)
        else:
            merge_first_inline(history, size)
        history.check()


def merge_first_inline(history: History, count: int) -> None:
    run = history.previous.manifest.segments[:count]
    if not run:
        return
    merged = entry(run[0].base_offset, run[-1].end_offset, name=f"m{history.random_id()}")
    merged = msgspec.structs.replace(merged, kind=SegmentKind.MERGED, first_leaf=run[0].first_leaf)
    edit = history.edit()
    assert edit.replace(merged) == run
    history.commit(edit)
    first = history.expected.index(run[0])
    history.expected[first : first + len(run)] = [merged]


def test_the_root_stays_small_however_long_the_history() -> None:
    history = History(limits=ManifestLimits(inline_segments_max=8, page_segments=4, page_fan_in=4, inline_removed_max=4))
    for index in range(600):
        history.append(entry(index, index + 1))
    manifest = history.previous.manifest
    assert len(manifest.pages) <= 3 * 5
    assert len(manifest.segments) <= 8
    history.check()


def test_gaps_and_overlaps_are_refused() -> None:
    history = grown([5], [0])
    for base, end in ((14, 20), (16, 20), (15, 15), (10, 15)):
        with pytest.raises(Invalid):
            history.append(entry(base, end))


def test_a_merge_must_cover_exactly_what_it_replaces() -> None:
    history = grown([5, 5, 5], [0, 0, 0])
    for wrong in (entry(10, 19), entry(11, 20), entry(10, 20, records=9), entry(30, 40)):
        with pytest.raises(Invalid):
            history.edit().replace(wrong)


def test_a_run_inside_a_page_is_replaced_by_a_new_page() -> None:
    history = grown([5] * 9, [3] * 9)
    ref = history.previous.manifest.pages[0]
    merged = entry(ref.base_offset, ref.end_offset, 3, name="m")
    edit = history.edit()
    run = edit.replace(merged, history.load(edit.pages_for_replace(merged.base_offset)))
    history.commit(edit)
    assert [e.end_offset for e in run][-1] == ref.end_offset
    assert history.find(ref.base_offset) == merged
    assert ref.key in {removed.key for removed in history.removed_objects()}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["append", "drop", "merge", "delete"]), st.integers(1, 9)), max_size=60), st.data())
def test_every_removed_object_is_deleted_once_and_after_its_time(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    """Every stored object is live, listed as removed, or deleted: none is forgotten, none is deleted early."""
    history = History()
    deleted: set[str] = set()
    removed_at: dict[str, int] = {}
    for kind, size in steps:
        history.now_ms += size
        end = history.previous.manifest.end_offset
        if kind == "append":
            history.append(*(entry(end + i * 3, end + i * 3 + 3, name=f"a{history.now_ms}") for i in range(size)))
        elif kind == "drop":
            history.drop(history.previous.manifest.start_offset + 3 * size)
        elif kind == "merge":
            merge_first_inline(history, size)
        else:
            before_ms = history.now_ms - data.draw(st.integers(0, 20))
            gone = history.delete_due(before_ms, size)
            assert len(gone) <= size
            assert all(removed_at[key] <= before_ms for key in gone)
            assert deleted.isdisjoint(gone)
            deleted.update(gone)
        remembered = history.removed_objects()
        assert [each.removed_at_ms for each in remembered] == sorted(each.removed_at_ms for each in remembered)
        for each in remembered:
            assert removed_at.setdefault(each.key, each.removed_at_ms) == each.removed_at_ms
        keys = {each.key for each in remembered}
        assert deleted.isdisjoint(keys)
        manifest = history.previous.manifest
        referenced = {*(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.removed_lists)}
        referenced |= {ref.key for ref in manifest.tree.pages}
        parts = {key for key in history.stored if not key.startswith("manifests/")}
        assert parts - referenced <= keys, "what is not referenced any more is remembered"
        assert len(manifest.removed) <= LIMITS.inline_removed_max


def test_many_removed_objects_are_in_few_lists() -> None:
    limits = ManifestLimits(inline_segments_max=4, page_segments=2, page_fan_in=3, inline_removed_max=3)
    history = History(limits=limits)
    for index in range(0, 900, 3):
        history.append(*(entry(index + n, index + n + 1) for n in range(3)))
        history.drop(index + 3)
    removed = [removed for removed in history.removed_objects() if removed.reason == "expired"]
    assert [removed.key for removed in removed] == [entry(n, n + 1).key for n in range(900)]
    assert len(history.previous.manifest.removed_lists) <= 2 * 7
    assert {removed.object_bytes for removed in removed} == {100}


def test_an_edit_without_a_change_says_so() -> None:
    history = grown([5, 5], [0, 0])
    edit = history.edit()
    edit.drop_below(12, lambda _: Removal(reason="expired"))
    edit.forget_due(10**9, 100)
    edit.move_to_pages()
    assert not edit.is_changed
    edit.drop_below(15, lambda _: Removal(reason="expired"))
    assert edit.is_changed


def test_an_empty_history_remembers_where_it_ended() -> None:
    history = grown([5, 5], [0, 0])
    history.drop(99)
    assert (history.previous.manifest.start_offset, history.previous.manifest.end_offset) == (20, 20)
    history.append(entry(20, 22))
    history.check()


def test_versions_are_chained_by_digest() -> None:
    history = grown([5], [0])
    first = history.previous
    history.append(entry(15, 18))
    second = history.previous.manifest
    assert (second.version, second.previous_key, second.previous_sha256) == (2, first.key, first.sha256)
    assert hashlib.sha256(history.stored[first.key]).digest() == first.sha256


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    history = grown([5, 5], [0, 0])
    content = bytearray(history.stored[history.previous.key])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((Corrupt, Invalid)):
        decode_manifest(content, history.previous.sha256)


def test_another_format_version_is_refused() -> None:
    content = bytearray(encode_manifest(grown([5], [0]).previous.manifest))
    for version, problem in ((1, "was written by a pre-release"), (2, "was written by a pre-release"), (4, "is unknown")):
        content[8:10] = version.to_bytes(2, "big")
        with pytest.raises(Invalid, match=f"format version {version} {problem}; this release reads 3"):
            decode_manifest(content)


@pytest.mark.parametrize("flag", [1, 0x8000])
def test_an_unknown_flag_is_refused(flag: int) -> None:
    content = bytearray(encode_manifest(grown([5], [0]).previous.manifest))
    content[10:12] = flag.to_bytes(2, "big")
    with pytest.raises(Invalid, match=f"has flags {flag:#06x}, which a reader must understand"):
        decode_manifest(content)


def test_a_manifest_of_a_newer_writer_is_read_and_not_edited() -> None:
    """An edit by this release would drop the members that it does not know."""
    manifest = msgspec.structs.replace(grown([5], [0]).previous.manifest, oldest_writer=WRITER_VERSION + 1)
    members = msgspec.msgpack.decode(encode_manifest(manifest)[16:])
    body = msgspec.msgpack.encode({**members, "novelty": [1, 2]})
    newer = decode_manifest(struct.pack(">8sHHI", MANIFEST_MAGIC, FORMAT_VERSION, 0, crc32c(body)) + body)
    assert newer == manifest
    with pytest.raises(Invalid, match=f"by writers from version {WRITER_VERSION + 1} on; this release is writer version"):
        ManifestEdit(Previous(manifest=newer), writer="worker", random_id=lambda: 1)


def test_signatures_stay_while_the_head_does() -> None:
    history = grown([5, 5], [0, 0])
    signature = Signature(algorithm="ml-dsa-87", key_id="auditor", value=bytes(4627))
    signed = msgspec.structs.replace(history.previous.manifest, signatures=(signature,), cluster_id="cluster")
    history.previous = Previous(manifest=signed)
    history.drop(15)
    assert history.previous.manifest.signatures == (signature,)
    history.append(entry(20, 25))
    assert len(history.previous.manifest.signatures) == 0
    assert history.previous.manifest.cluster_id == "cluster"


def test_the_minimum_timestamp_of_a_page_is_unknown_if_that_of_a_segment_is() -> None:
    history = History()
    for index, minimum in enumerate((7, 3, 9, 5, None, 4, 6, 8)):
        history.append(msgspec.structs.replace(entry(index, index + 1), min_timestamp_ms=minimum))
    assert [ref.min_timestamp_ms for ref in history.previous.manifest.pages] == [3, 5]
    history.append(msgspec.structs.replace(entry(8, 9), min_timestamp_ms=1))
    assert [ref.min_timestamp_ms for ref in history.previous.manifest.pages] == [None]


@pytest.mark.parametrize(
    ("member", "value", "problem"),
    [
        ("data_position", 1, "data or footer beyond"),
        ("footer_position", -1, "data or footer beyond"),
        ("leaf_count", 6, "leaves beyond"),
        ("options", SegmentOptions(present=PresentBatches(base_offset=9, end_offset=12, batch_count=1)), "does not cover"),
        ("options", SegmentOptions(dirty_from=2), "compacted up to offset 2, which it does not cover"),
        (
            "options",
            SegmentOptions(present=PresentBatches(base_offset=10, end_offset=15, batch_count=1), dirty_from=15),
            "compacted up to offset 15",
        ),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(member: str, value: object, problem: str) -> None:
    manifest = grown([5], [0]).previous.manifest
    wrong = msgspec.structs.replace(manifest.segments[0], **{member: value})
    with pytest.raises(Invalid, match=problem):
        encode_manifest(msgspec.structs.replace(manifest, segments=(wrong,)))


def test_a_compacted_segment_may_be_dirty_from_its_base_offset() -> None:
    manifest = grown([5], [0]).previous.manifest
    (entry,) = manifest.segments
    present = PresentBatches(base_offset=entry.base_offset, end_offset=entry.end_offset, batch_count=1)
    options = SegmentOptions(present=present, dirty_from=entry.base_offset)
    dirty = msgspec.structs.replace(manifest, segments=(msgspec.structs.replace(entry, options=options),))
    content = encode_manifest(dirty)
    assert decode_manifest(content).segments[0].options.dirty_from == entry.base_offset


def test_a_sound_manifest_that_is_not_the_committed_one_is_refused() -> None:
    history = grown([5], [0])
    with pytest.raises(Corrupt, match="not the committed one"):
        decode_manifest(encode_manifest(history.previous.manifest), b"x" * 32)
