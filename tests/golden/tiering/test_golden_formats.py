"""Stored formats, byte by byte: what was once written must be read for ever, and written alike until the version rises.

The segments were written by format version 2, the manifest's objects by version 3; ``pre_release_*.bin`` are of older versions,
which are refused. If a test here fails, the format changed: give it a new version and a new golden file beside the old one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import pytest
from msgspec.structs import replace

from stratalog_core.batches.batch import TIMESTAMP_TYPE_BIT
from stratalog_core.batches.checkpoint import Checkpoint, EpochStart, OngoingTransaction, ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid
from stratalog_tiering.format.block_cipher import BlockCipher, SegmentEncryption
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state, encode_state
from stratalog_tiering.format.descriptor import (
    CommitMarker,
    DeletionMarker,
    Descriptor,
    Detachment,
    OwnerDescriptor,
    TopicDescriptor,
    WrappedDataKey,
    decode_descriptor,
    encode_descriptor,
)
from stratalog_tiering.format.erased_leaves import ErasedLeaf, parse_erased
from stratalog_tiering.format.footer import AbortedTransaction, Signature, encode_footer, parse_producers, parse_signatures
from stratalog_tiering.format.manifest import (
    Manifest,
    ManifestPage,
    PageRef,
    PresentBatches,
    Reason,
    RemovedList,
    RemovedListRef,
    RemovedObject,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    SourceSegment,
    decode_manifest,
    decode_page,
    decode_removed_list,
    encode_manifest,
    encode_page,
    encode_removed_list,
)
from stratalog_tiering.format.merkle import leaf_hash, root_hash
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import (
    data_key_key,
    deletion_marker_key,
    manifest_key,
    marker_key,
    page_key,
    removed_list_key,
    segment_key,
    topic_key,
    tree_page_key,
    version_key,
)
from stratalog_tiering.format.partition_tree import (
    PartitionTree,
    TreePage,
    TreePageRef,
    check_tree,
    decode_tree_page,
    encode_tree_page,
    tree_span,
)
from stratalog_tiering.format.segment import SegmentFooter, SegmentIdentity, SegmentWriter, audit_block, parse_footer

HERE = Path(__file__).parent
TOPIC = UUID("11112222-3333-4444-8555-666677778888")


def golden(name: str, content: bytes) -> bytes:
    """The golden bytes; written anew only when asked by ``STRATALOG_WRITE_GOLDEN``."""
    path = HERE / name
    if os.environ.get("STRATALOG_WRITE_GOLDEN"):
        path.write_bytes(content)
    return path.read_bytes()


PRODUCER = ProducerEntry(4, 1, (SequencedBatch(0, 1, 105, 1_700_000_000_000),), 12)
ABORTED = AbortedTransaction(producer_id=5, first_offset=100, last_offset=103, last_stable_offset=104)
SIGNATURES = (
    Signature(algorithm="ed25519", key_id="archive-2026", value=bytes(range(64))),
    Signature(algorithm="ml-dsa-87", key_id="archive-2027", value=bytes(4627)),
)


def make_segment(
    producers: Sequence[ProducerEntry] = (),
    aborted: Sequence[AbortedTransaction] = (),
    attributes: int = 0,
    zstd_level: int | None = None,
    value: Callable[[int], bytes] = lambda offset: b"value",
    encryption: SegmentEncryption | None = None,
    bases: Sequence[tuple[int, int]] = ((100, 1), (102, 1), (104, 2)),
    erased: Sequence[ErasedLeaf] = (),
    *,
    is_compacted: bool = False,
) -> tuple[bytes, SegmentFooter]:
    identity = SegmentIdentity(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA", topic_id=TOPIC, topic_name="flights", partition=3, base_offset=100,
        ledger_ids=(7, 9),
    )  # fmt: skip
    writer = SegmentWriter(
        identity, block_bytes_target=150, zstd_level=zstd_level, encryption=encryption, is_compacted=is_compacted
    )
    for base, epoch in bases:
        records = [
            Record(offset=base + n, timestamp_ms=1_700_000_000_000 - n, key=b"k", value=value(base + n)) for n in range(2)
        ]
        writer.append(bytes(build_batch(records, leader_epoch=epoch, attributes=attributes)))
    written = writer.finish(
        created_at_ms=1_700_000_001_000,
        leader_epochs=(EpochStart(0, 0), EpochStart(1, 90), EpochStart(2, 104)),
        aborted_transactions=aborted,
        producers=producers,
        erased=erased,
    )
    return b"".join(bytes(part) for part in writer.take_parts()), written.footer


def entry(base: int, end: int) -> SegmentEntry:
    return SegmentEntry(
        key=segment_key(TOPIC, 3, base, 2, 0xABCD), base_offset=base, end_offset=end, data_bytes=900, footer_position=900,
        footer_bytes=100, object_bytes=1000, object_sha256=hashlib.sha256(b"object").digest(),
        footer_sha256=hashlib.sha256(b"footer").digest(), record_count=end - base, first_leaf=base - 100,
        leaf_count=end - base, min_timestamp_ms=1_600_000_000_000, max_timestamp_ms=1_700_000_000_000,
        first_timestamp_min_ms=1_600_000_000_000, leader_epochs=(EpochStart(2, base),), created_at_ms=1_700_000_001_000,
    )  # fmt: skip


def merged(base: int, end: int) -> SegmentEntry:
    sources = tuple(SourceSegment(base_offset=each, leader_epoch=2, random_id=2**64 - 1 - each) for each in range(base, end))
    return replace(entry(base, end), kind=SegmentKind.MERGED, merge_count=1, sources=sources)


def make_page() -> ManifestPage:
    return ManifestPage(topic_id=TOPIC, partition=3, segments=(entry(100, 110), merged(110, 125)))


def optional(base: int, **options: object) -> SegmentEntry:
    return replace(entry(base, base + 5), options=replace(SegmentOptions(), **options))


def make_optional_page() -> ManifestPage:
    """One segment for each optional member of an entry, and one with all of them in an object that it shares."""
    present = PresentBatches(base_offset=121, end_offset=123, batch_count=1)
    everything = optional(
        125, version_id="3HL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY", lock_until_ms=1_800_000_000_000, storage_class="GLACIER_IR",
        present=PresentBatches(base_offset=125, end_offset=125, batch_count=0),
    )  # fmt: skip
    return ManifestPage(
        topic_id=TOPIC,
        partition=3,
        segments=(
            replace(entry(100, 105), min_timestamp_ms=None),
            optional(105, version_id="3HL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY"),
            optional(110, lock_until_ms=1_800_000_000_000),
            optional(115, storage_class="STANDARD_IA"),
            replace(optional(120, present=present), kind=SegmentKind.COMPACTED, merge_count=1),
            replace(everything, kind=SegmentKind.ERASED, data_position=4096, footer_position=5000, object_bytes=10_000),
        ),
    )


def make_compacted_page() -> ManifestPage:
    present = PresentBatches(base_offset=131, end_offset=135, batch_count=2)
    compacted = replace(optional(130, present=present, dirty_from=133), kind=SegmentKind.COMPACTED)
    return ManifestPage(topic_id=TOPIC, partition=3, segments=(compacted,))


def make_tree_page() -> TreePage:
    return TreePage(
        topic_id=TOPIC, partition=3, first_leaf=0, spans=(tree_span(0, leaves(0, 10)), tree_span(10, leaves(10, 25)))
    )


def leaves(first: int, end: int) -> list[bytes]:
    return [leaf_hash((b"%d" % number,)) for number in range(first, end)]


def make_tree() -> PartitionTree:
    content = encode_tree_page(make_tree_page())
    ref = TreePageRef(
        key=tree_page_key(TOPIC, 3, 0, 0, 0x99), sha256=object_sha256(content), object_bytes=len(content), level=0,
        leaf_count=25,
    )  # fmt: skip
    peaks = b"".join((root_hash(leaves(0, 16)), root_hash(leaves(16, 24)), root_hash(leaves(24, 25))))
    span = tree_span(25, leaves(25, 40))
    return PartitionTree(size=40, head=root_hash(leaves(0, 40)), peaks=peaks, spans=(span,), pages=(ref,))


def removed(base: int, reason: str) -> RemovedObject:
    return RemovedObject(
        key=segment_key(TOPIC, 3, base, 2, 0xABCD), object_bytes=1000, reason=reason, removed_at_ms=1_700_000_001_500 + base,
        policy="retention.ms=604800000" if reason == Reason.RETENTION_MS else "", actor="tiering-1",
    )  # fmt: skip


def make_removed_list() -> RemovedList:
    objects = (removed(100, Reason.RETENTION_MS), removed(110, Reason.RETENTION_BYTES), removed(120, Reason.LOG_START))
    return RemovedList(topic_id=TOPIC, partition=3, number=4, objects=objects)


def make_manifest() -> Manifest:
    content = encode_removed_list(make_removed_list())
    list_ref = RemovedListRef(
        key=removed_list_key(TOPIC, 3, 4, 0x77), sha256=object_sha256(content), list_bytes=len(content), number=4,
        deleted_count=1, object_count=2, removed_at_ms=1_700_000_001_610,
    )  # fmt: skip
    page = encode_page(make_page())
    ref = PageRef(
        key=page_key(TOPIC, 3, 100, 0, 0x1234), sha256=object_sha256(page), object_bytes=len(page), level=0, base_offset=110,
        end_offset=125, min_timestamp_ms=1_600_000_000_000, max_timestamp_ms=1_700_000_000_000, segment_count=1,
    )  # fmt: skip
    return Manifest(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA", oldest_writer=1, topic_id=TOPIC, topic_name="flights", partition=3, version=12,
        previous_key=manifest_key(TOPIC, 3, 11, 0x55),
        previous_sha256=hashlib.sha256(b"previous").digest(), created_at_ms=1_700_000_002_000, writer="tiering-1",
        start_offset=110, end_offset=140, record_count=30, cold_bytes=2000, pages=(ref,), segments=(entry(125, 140),),
        removed=(removed(140, Reason.MERGED),), removed_lists=(list_ref,), removed_lists_made=5, settled_version=7,
        settled_at_ms=1_700_000_000_500, tree=make_tree(),
        signatures=(Signature(algorithm="ed25519", key_id="auditor-1", value=bytes(64)),),
    )  # fmt: skip


def make_minimal_manifest() -> Manifest:
    return Manifest(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA", oldest_writer=1, topic_id=TOPIC, topic_name="flights", partition=3, version=1,
        previous_key="", previous_sha256=b"", created_at_ms=1_700_000_002_000, writer="tiering-1", start_offset=0, end_offset=0,
        record_count=0, cold_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("segment.bin", make_segment()),
        ("segment_producers.bin", make_segment(producers=(PRODUCER,))),
        ("segment_aborted.bin", make_segment(aborted=(ABORTED,))),
        ("segment_log_append_time.bin", make_segment(attributes=TIMESTAMP_TYPE_BIT)),
        ("segment_compacted.bin", make_segment(bases=((101, 1), (109, 2)), is_compacted=True)),
    ],
)
def test_segment(name: str, made: tuple[bytes, SegmentFooter]) -> None:
    content, footer = made
    stored = golden(name, content)
    assert stored == content
    assert parse_footer(stored, len(stored)) == footer
    for section in footer.sections:
        assert parse_producers(stored[section.position : section.end_position], section) == (PRODUCER,)


def test_erased_segment() -> None:
    erased = (ErasedLeaf(0, hashlib.sha256(b"first").digest()), ErasedLeaf(2, hashlib.sha256(b"third").digest()))
    content, footer = make_segment(producers=(PRODUCER,), erased=erased)
    stored = golden("segment_erased.bin", content)
    assert stored == content
    assert parse_footer(stored, len(stored)) == footer
    section = footer.section("erased")
    assert section is not None
    assert parse_erased(stored[section.position : section.end_position], section) == erased


def test_signed_segment() -> None:
    content, footer = make_segment()
    signed = content[: footer.position] + encode_footer(footer, SIGNATURES)
    stored = golden("segment_signed.bin", signed)
    assert stored == signed
    assert parse_footer(stored, len(stored)) == footer
    assert parse_signatures(stored, len(stored)) == SIGNATURES


def test_compressed_segment() -> None:
    """Other releases of zstd may write other frames, so only what the frames hold is compared."""

    def value(offset: int) -> bytes:
        return hashlib.shake_128(b"%d" % offset).digest(300) if offset in (102, 103) else b"compressible " * 30

    content, footer = make_segment(zstd_level=3, value=value)
    stored = golden("segment_zstd.bin", content)
    read = parse_footer(stored, len(stored))
    plain_content, plain_footer = make_segment(value=value)
    assert [block.is_compressed for block in read.blocks] == [block.is_compressed for block in footer.blocks]
    assert [block.is_compressed for block in read.blocks] == [True, False, True]
    assert read.block_compression == footer.block_compression == "zstd"
    for block, plain in zip(read.blocks, plain_footer.blocks, strict=True):
        found = audit_block(stored[block.position : block.end_position], block)
        assert found == plain_content[plain.position : plain.end_position]
        assert block.leaves_root == plain.leaves_root


def test_encrypted_segment() -> None:
    key = data_key_key(segment_key(TOPIC, 3, 100, 2, 0xABCD))
    cipher = BlockCipher(bytes(range(32)))
    content, footer = make_segment(encryption=SegmentEncryption(data_key=key, cipher=cipher))
    stored = golden("segment_encrypted.bin", content)
    assert stored == content
    read = parse_footer(stored, len(stored))
    assert read == footer
    assert (read.block_encryption, read.data_key) == ("aes-256-gcm", key)
    plain_content, plain_footer = make_segment()
    for number, (block, plain) in enumerate(zip(read.blocks, plain_footer.blocks, strict=True)):
        assert block.nonce == number.to_bytes(12, "big")
        found = audit_block(stored[block.position : block.end_position], block, cipher=cipher)
        assert found == plain_content[plain.position : plain.end_position]
        assert block.leaves_root == plain.leaves_root


def test_the_layout_before_the_first_release_is_refused() -> None:
    stored = (HERE / "pre_release_segment.bin").read_bytes()
    with pytest.raises(Invalid, match="format version 1, a layout from before the first release"):
        parse_footer(stored, len(stored))


def test_manifest() -> None:
    stored = golden("manifest.bin", encode_manifest(make_manifest()))
    assert stored == encode_manifest(make_manifest())
    assert decode_manifest(stored) == make_manifest()


def test_a_manifest_without_optional_members() -> None:
    stored = golden("manifest_minimal.bin", encode_manifest(make_minimal_manifest()))
    assert stored == encode_manifest(make_minimal_manifest())
    assert decode_manifest(stored) == make_minimal_manifest()


def test_a_manifest_of_locked_objects() -> None:
    until_ms = 1_800_000_000_000
    locked = optional(125, version_id="3HL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY", lock_until_ms=until_ms, lock_mode="compliance")
    manifest = replace(
        make_manifest(), oldest_writer=2, end_offset=130, segments=(locked,), lock_until_ms=until_ms, lock_mode="compliance"
    )
    stored = golden("manifest_locked.bin", encode_manifest(manifest))
    assert stored == encode_manifest(manifest)
    assert decode_manifest(stored) == manifest


def test_a_page_with_every_optional_member() -> None:
    stored = golden("page_optional.bin", encode_page(make_optional_page()))
    assert stored == encode_page(make_optional_page())
    assert decode_page(stored, object_sha256(stored)) == make_optional_page()


def test_a_page_of_a_segment_that_is_compacted_in_part() -> None:
    stored = golden("page_compacted.bin", encode_page(make_compacted_page()))
    assert stored == encode_page(make_compacted_page())
    assert decode_page(stored, object_sha256(stored)) == make_compacted_page()


def test_tree_page() -> None:
    stored = golden("tree.bin", encode_tree_page(make_tree_page()))
    assert stored == encode_tree_page(make_tree_page())
    assert decode_tree_page(stored, object_sha256(stored)) == make_tree_page()
    check_tree(make_tree())


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("pre_release_manifest.bin", decode_manifest),
        ("pre_release_page.bin", lambda content: decode_page(content, object_sha256(content))),
        ("pre_release_removed.bin", lambda content: decode_removed_list(content, object_sha256(content))),
    ],
)
def test_the_layout_of_a_pre_release_is_refused(name: str, decode: Callable[[bytes], object]) -> None:
    with pytest.raises(Invalid, match="format version 2 was written by a pre-release; this release reads 3"):
        decode((HERE / name).read_bytes())


def test_removed_list() -> None:
    stored = golden("removed.bin", encode_removed_list(make_removed_list()))
    assert stored == encode_removed_list(make_removed_list())
    assert decode_removed_list(stored, object_sha256(stored)) == make_removed_list()


def test_coordinator_state() -> None:
    state = CoordinatorState(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA", owner_number=1, topic="__consumer_offsets", topic_id=TOPIC, partition=3,
        partition_count=50, replication_factor=3, configs={"cleanup.policy": "compact"}, leader_epoch=7,
        taken_at_ms=1_700_000_000_000,
        checkpoint=Checkpoint(
            offset=120, leader_epochs=(EpochStart(7, 100),), producers=(PRODUCER,), transactions=(OngoingTransaction(4, 104),),
            application_state=b"\x81\xa7version\x01",
        ),
    )  # fmt: skip
    stored = golden("coordinator_state.bin", encode_state(state))
    assert stored == encode_state(state)
    assert decode_state(stored, state.place) == state


def test_page() -> None:
    stored = golden("page.bin", encode_page(make_page()))
    assert stored == encode_page(make_page())
    assert decode_page(stored, object_sha256(stored)) == make_page()


@pytest.mark.parametrize(
    ("name", "descriptor"),
    [
        (
            "owner.json",
            OwnerDescriptor(
                cluster_id="BBBBBBBBBBBBBBBBBBBBBA",
                number=1,
                taken_at_ms=1_700_000_000_000,
                previous_cluster_id="AAAAAAAAAAAAAAAAAAAAAA",
            ),
        ),
        (
            "topic.json",
            TopicDescriptor(
                topic_id=TOPIC, name="flights", partition_count=12, replication_factor=3, configs={"retention.ms": "-1"}
            ),
        ),
        (
            "topic_detached.json",
            TopicDescriptor(
                topic_id=TOPIC,
                name="flights",
                partition_count=12,
                replication_factor=3,
                detached=Detachment(cluster_id="AAAAAAAAAAAAAAAAAAAAAA", topic_version=418),
            ),
        ),
        (
            "deleted_by_cluster.json",
            DeletionMarker(
                topic_id=TOPIC,
                deleted_at_ms=1_700_000_000_000,
                deletion_version=417,
                cluster_id="AAAAAAAAAAAAAAAAAAAAAA",
                restorable_ms=3_600_000,
            ),
        ),
        ("data_key.json", WrappedDataKey(topic_id=TOPIC, partition=3, key_name="k1", wrapped=bytes(range(60)))),
        ("marker.json", CommitMarker(manifest_key=manifest_key(TOPIC, 3, 12, 0x66), manifest_version=12, sha256="ab" * 32)),
    ],
)
def test_descriptors(name: str, descriptor: Descriptor) -> None:
    stored = golden(name, encode_descriptor(descriptor))
    assert stored == encode_descriptor(descriptor)
    assert decode_descriptor(stored, type(descriptor), name) == descriptor


def test_a_deletion_marker_without_its_cluster() -> None:
    stored = (HERE / "deleted.json").read_bytes()
    expected = DeletionMarker(
        topic_id=TOPIC, deleted_at_ms=1_700_000_000_000, deletion_version=417, cluster_id="", restorable_ms=86_400_000
    )
    assert decode_descriptor(stored, DeletionMarker, "deleted.json") == expected


def test_a_deletion_marker_without_the_version_of_its_deletion() -> None:
    stored = b'{"topic_id": "%s", "deleted_at_ms": 1700000000000, "format_version": 1}' % str(TOPIC).encode()
    expected = DeletionMarker(topic_id=TOPIC, deleted_at_ms=1_700_000_000_000, deletion_version=0)
    assert decode_descriptor(stored, DeletionMarker, "deleted.json") == expected


def test_keys() -> None:
    topic = "11112222333344448555666677778888"
    assert topic_key(TOPIC, 12) == f"topics/{topic}/fffffffffffffff3-12.json"
    assert tree_page_key(TOPIC, 3, 100, 1, 0x1234) == f"tree/{topic}/3/00000000000000000100-1-0000000000001234.tree"
    assert deletion_marker_key(TOPIC) == f"topics/{topic}.deleted"
    assert (
        segment_key(TOPIC, 3, 100, 2, 0xABCD) == f"segments/{topic}/3/00000000000000000100-0000000002-000000000000abcd.segment"
    )
    assert data_key_key(segment_key(TOPIC, 3, 100, 2, 0xABCD)) == (
        f"segments/{topic}/3/00000000000000000100-0000000002-000000000000abcd.key"
    )
    assert page_key(TOPIC, 3, 100, 1, 0x1234) == f"pages/{topic}/3/00000000000000000100-1-0000000000001234.page"
    assert removed_list_key(TOPIC, 3, 4, 0x77) == f"removed/{TOPIC.hex}/3/{4:020d}-0000000000000077.removed"
    manifest = manifest_key(TOPIC, 3, 12, 0x66)
    assert manifest == f"manifests/{topic}/3/fffffffffffffff3-12-0000000000000066.manifest"
    assert marker_key(manifest) == f"manifests/{topic}/3/fffffffffffffff3-12-0000000000000066.committed"
    version = version_key(TOPIC, 3, 12)
    assert version == marker_key(version) == f"manifests/{topic}/3/fffffffffffffff3-12.version"
