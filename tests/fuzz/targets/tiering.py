"""Objects in the store: whatever stands at a key, readers say what is wrong with it."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from uuid import UUID

from crc32c import crc32c

from fuzz import seals
from fuzz.target import Target
from fuzz.targets.batches import UNPACKED, sound_batches
from stratalog_core.batches.batch import assign_offset, read_header
from stratalog_core.batches.records import iterate_records
from stratalog_tiering.format import object_keys
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.descriptor import (
    PARTITIONS_MAX,
    CommitMarker,
    DeletionMarker,
    Descriptor,
    OwnerDescriptor,
    TopicDescriptor,
    WrappedDataKey,
    decode_descriptor,
    encode_descriptor,
)
from stratalog_tiering.format.footer import (
    PRODUCERS,
    TRAILER_BYTES,
    locate_footer,
    parse_footer,
    parse_producers,
    parse_signatures,
)
from stratalog_tiering.format.lookup import live_segments, locate, locate_in_page
from stratalog_tiering.format.manifest import decode_manifest, decode_page, decode_removed_list
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.partition_tree import check_tree, decode_tree_page, span_subtrees
from stratalog_tiering.format.segment import (
    SegmentIdentity,
    SegmentWriter,
    audit_block,
    find_block,
    iterate_block_batches,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "tiering"
CIPHER = BlockCipher(bytes(range(32)))
"""That of the encrypted golden segment."""
TOPIC = UUID("11112222-3333-4444-8555-666677778888")


# -- segments


@cache
def segments() -> tuple[bytes, ...]:
    writer = SegmentWriter(
        SegmentIdentity(cluster_id="c", topic_id=TOPIC, topic_name="flights", partition=3, base_offset=0, ledger_ids=(7,)),
        block_bytes_target=150,
    )
    for batch in map(bytearray, sound_batches()):
        assign_offset(batch, writer.next_offset, 1)
        writer.append(bytes(batch))
    writer.finish(created_at_ms=5)
    made = b"".join(bytes(part) for part in writer.take_parts())
    return tuple(seals.sealed(content) for content in (*map(Path.read_bytes, GOLDEN.glob("segment*.bin")), made))


def seal_segment(content: bytes) -> bytes:
    """CRCs of trailer, signatures and footer, which end where the trailer begins and are as long as it says."""
    if len(content) < TRAILER_BYTES:
        return content
    _, length, _, signatures_length = struct.unpack_from(">QIII", content, len(content) - TRAILER_BYTES)
    signatures_length = min(signatures_length, len(content) - TRAILER_BYTES)
    length = min(length, len(content) - TRAILER_BYTES - signatures_length)
    signatures_at = len(content) - TRAILER_BYTES - signatures_length
    footer, signatures = content[signatures_at - length : signatures_at], content[signatures_at:-TRAILER_BYTES]
    crcs = crc32c(footer), signatures_length, crc32c(signatures)
    head = struct.pack(">QIIII", signatures_at - length, length, *crcs) + content[-16:-12]
    return content[:-TRAILER_BYTES] + head + struct.pack(">I", crc32c(head)) + content[-8:]


def read_segment(content: bytes) -> None:
    """As a cold reader and a verifier do: trailer, footer, each block, each batch, each record."""
    stored = seals.opened(content, seal_segment)
    locate_footer(stored[-TRAILER_BYTES:], len(stored))
    footer = parse_footer(stored, len(stored))
    parse_signatures(stored, len(stored))
    producers = footer.section(PRODUCERS)
    if producers is not None:
        parse_producers(stored[producers.position : producers.end_position], producers)
    for index, entry in enumerate(footer.blocks[:20]):
        assert find_block(footer.blocks, entry.base_offset) == index
        block = stored[entry.position : entry.end_position]
        for batch, header in iterate_block_batches(audit_block(block, entry, cipher=CIPHER)):
            assert read_header(batch) == header
            for _ in iterate_records(batch, header):
                pass


# -- manifests


def seal_body(content: bytes) -> bytes:
    """The CRC in the header of a root or page."""
    return content[:12] + struct.pack(">I", crc32c(content[16:])) + content[16:]


def golden(*names: str) -> list[bytes]:
    return [seals.sealed((GOLDEN / name).read_bytes()) for name in names]


def read_manifest(content: bytes) -> None:
    stored = seals.opened(content, seal_body)
    manifest = decode_manifest(stored, object_sha256(stored))
    check_tree(manifest.tree)
    for offset in (manifest.start_offset, manifest.end_offset - 1, manifest.end_offset):
        locate(manifest, offset)


def read_page(content: bytes) -> None:
    stored = seals.opened(content, seal_body)
    page = decode_page(stored, object_sha256(stored))
    root = decode_manifest((GOLDEN / "manifest.bin").read_bytes())
    for entry in live_segments(root, page):
        locate_in_page(page, entry.base_offset)


def read_removed(content: bytes) -> None:
    stored = seals.opened(content, seal_body)
    decode_removed_list(stored, object_sha256(stored))


def read_tree_page(content: bytes) -> None:
    stored = seals.opened(content, seal_body)
    page = decode_tree_page(stored, object_sha256(stored))
    first = page.first_leaf
    for span in page.spans[:20]:
        span_subtrees(first, span)
        first += span.leaf_count


# -- descriptors and keys

_DESCRIPTORS: tuple[Descriptor, ...] = (
    OwnerDescriptor(cluster_id="c", number=0, taken_at_ms=1),
    TopicDescriptor(topic_id=TOPIC, name="t", partition_count=1, replication_factor=1, configs={"a": "b"}),
    DeletionMarker(topic_id=TOPIC, deleted_at_ms=1),
    WrappedDataKey(topic_id=TOPIC, partition=3, key_name="k1", wrapped=b"wrapped"),
    CommitMarker(manifest_key="manifests/k", manifest_version=3, sha256="ab" * 32),
)


def read_descriptor(content: bytes) -> None:
    """The first byte says which it should be."""
    kind = type(_DESCRIPTORS[content[0] % len(_DESCRIPTORS) if content else 0])
    made = decode_descriptor(content[1:], kind, "key")
    if isinstance(made, CommitMarker):
        bytes.fromhex(made.sha256)
    if isinstance(made, TopicDescriptor):
        assert made.partition_count <= PARTITIONS_MAX, "readers go through all of them"


def parse_key(content: bytes) -> None:
    key = content.decode("utf-8", "replace")
    object_keys.parse_segment_key(key)
    object_keys.parse_manifest_key(key)
    object_keys.parse_topic_key(key)
    object_keys.newest_committed([key])


def keys() -> list[bytes]:
    manifest = object_keys.manifest_key(TOPIC, 3, 7, 9)
    made = (
        object_keys.segment_key(TOPIC, 3, 7, 1, 9),
        manifest,
        object_keys.marker_key(manifest),
        object_keys.version_key(TOPIC, 3, 7),
        object_keys.topic_key(TOPIC, 3),
    )
    return [key.encode() for key in made]


MANIFESTS = ("manifest.bin", "manifest_minimal.bin", "manifest_locked.bin")
TARGETS = (
    Target(name="segment", run=read_segment, seeds=segments, allocated_bytes_max=UNPACKED),
    Target(
        name="manifest", run=read_manifest, seeds=lambda: golden("manifest.bin", "manifest_minimal.bin", "manifest_locked.bin")
    ),
    Target(name="manifest-page", run=read_page, seeds=lambda: golden("page.bin", "page_optional.bin")),
    Target(name="removed-list", run=read_removed, seeds=lambda: golden("removed.bin")),
    Target(name="tree-page", run=read_tree_page, seeds=lambda: golden("tree.bin")),
    Target(
        name="descriptor",
        run=read_descriptor,
        seeds=lambda: [bytes((number,)) + encode_descriptor(one) for number, one in enumerate(_DESCRIPTORS)],
    ),
    Target(name="object-key", run=parse_key, seeds=keys),
)
