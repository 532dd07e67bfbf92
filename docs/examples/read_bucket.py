"""Read a bucket without any of Stratalog's code: ``python read_bucket.py DIRECTORY [TOPIC]`` prints its records as JSON.

Written from docs/reference/formats alone: object-keys.md, manifest.md and segment.md say what is read here. It needs Python
and, for blocks and batches compressed with zstd, the package zstandard. DIRECTORY is a local store, or a copy of a bucket.

Everything is verified before it is used: digests from the root down to the footers, every CRC, every Merkle root. It
raises ``Damaged`` for bytes that do not match, and ``Unsupported`` for what a reader must understand and this one does not.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FRAMES = {b"SLMANIFS": "manifest", b"SLMFPAGE": "page", b"SLMFRMVD": "removed", b"SLMFTREE": "tree"}
FRAMES[b"SLCOORDN"] = "coordinator state"  # coordinator-state.md
FRAME_VERSION, SEGMENT_VERSION, MUST_UNDERSTAND = 3, 2, 1
SEGMENT_ENTRY = (
    "key kind base_offset end_offset data_position data_bytes footer_position footer_bytes object_bytes object_sha256"
    " footer_sha256 record_count first_leaf leaf_count min_timestamp_ms max_timestamp_ms first_timestamp_min_ms leader_epochs"
    " created_at_ms merge_count sources options"
)
PAGE_REFERENCE = "key sha256 object_bytes level base_offset end_offset min_timestamp_ms max_timestamp_ms segment_count"
BLOCK_ENTRY = (
    "base_offset last_offset min_timestamp_ms max_timestamp_ms position length crc record_count batch_count leaves_root"
    " plain_length nonce"
)
SECTION_ENTRY = "name flags position length crc sha256"
BATCH = struct.Struct(">qiibIhiqqqhii")
TRAILER = struct.Struct(">QIIIIHHI8s")


class Damaged(Exception):
    """Stored bytes are not what they must be."""


class Unsupported(Exception):
    """The object needs a newer reader."""


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise Damaged(problem)


def named(names: str, array: list[Any]) -> dict[str, Any]:
    """The elements of an array by name; elements that a later release has appended are left out."""
    return dict(zip(names.split(), array, strict=False))


CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in CRC_TABLE]


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def merkle_root(leaves: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1."""
    if len(leaves) < 2:
        return leaves[0] if leaves else sha256()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return sha256(b"\x01", merkle_root(leaves[:split]), merkle_root(leaves[split:]))


class Unpacker:
    """Decodes one msgpack value at a time."""

    SIZED = dict(zip((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF), map(">".__add__, "BHIBHIHIHI"), strict=True))
    NUMBERS = dict(zip(range(0xCA, 0xD4), map(">".__add__, "fdBHIQbhiq"), strict=True))
    CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def take(self, length: int) -> bytes:
        require(self.position + length <= len(self.content), "msgpack body is cut")
        self.position += length
        return self.content[self.position - length : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self) -> Any:
        kind = self.take(1)[0]
        if kind <= 0x7F or kind >= 0xE0:
            return kind if kind <= 0x7F else kind - 0x100
        if kind in self.CONSTANTS:
            return self.CONSTANTS[kind]
        if kind in self.NUMBERS:
            return self.number(self.NUMBERS[kind])
        if kind <= 0x8F or kind in (0xDE, 0xDF):
            size = kind & 0x0F if kind <= 0x8F else self.number(self.SIZED[kind])
            return {self.value(): self.value() for _ in range(size)}
        if kind <= 0x9F or kind in (0xDC, 0xDD):
            return [self.value() for _ in range(kind & 0x0F if kind <= 0x9F else self.number(self.SIZED[kind]))]
        if kind <= 0xBF or kind in (0xD9, 0xDA, 0xDB):
            return self.take(kind & 0x1F if kind <= 0xBF else self.number(self.SIZED[kind])).decode()
        require(kind in self.SIZED, f"msgpack type {kind:#x} is not used by these formats")
        return self.take(self.number(self.SIZED[kind]))


def unpack(content: bytes) -> Any:
    unpacker = Unpacker(content)
    value = unpacker.value()
    require(unpacker.position == len(content), "bytes follow the msgpack body")
    return value


def read_framed(content: bytes, digest: bytes | None = None) -> dict[str, Any]:
    """The body of a root, page, tree page, list of removed objects or coordinator's state, with its kind as ``frame``."""
    require(digest is None or sha256(content) == digest, "the object is not the committed one: its SHA-256 differs")
    require(len(content) >= 16 and content[:8] in FRAMES, "the object is no frame")
    version, flags, crc = struct.unpack_from(">HHI", content, 8)
    if version != FRAME_VERSION or flags:
        raise Unsupported(f"frame of version {version} with flags {flags:#06x}")
    require(crc32c(content[16:]) == crc, "the frame does not match its CRC")
    body: dict[str, Any] = unpack(content[16:])
    for member, names in (("segments", SEGMENT_ENTRY), ("pages", PAGE_REFERENCE)):
        if member in body:
            body[member] = [named(names, array) for array in body[member]]
    return body | {"frame": FRAMES[content[:8]]}


def read_footer(tail: bytes) -> dict[str, Any]:
    """The footer of a segment, from its last bytes on; ``signatures`` is added to its members."""
    require(len(tail) >= TRAILER.size and tail.endswith(b"SLSEGMNT"), "the object is no segment, or cut")
    position, length, crc, signed, signed_crc, version, flags, trailer_crc, _ = TRAILER.unpack(tail[-TRAILER.size :])
    if version != SEGMENT_VERSION:
        raise Unsupported(f"segment of version {version}")
    require(crc32c(tail[-TRAILER.size : -12]) == trailer_crc, "the trailer does not match its CRC")
    if flags & ~1:  # bit 0: the segment is compacted
        raise Unsupported(f"segment with flags {flags:#06x}")
    start = len(tail) - TRAILER.size - signed - length
    require(start >= 0, "the footer is cut")
    body, signatures = tail[start : start + length], tail[start + length : len(tail) - TRAILER.size]
    require(crc32c(body) == crc and crc32c(signatures) == signed_crc, "footer or signatures do not match their CRC")
    footer: dict[str, Any] = unpack(body)
    require(bool(footer.get("compacted")) == bool(flags), "footer and trailer differ in whether the segment is compacted")
    if (footer["block_compression"], footer["block_encryption"]) not in (("none", "none"), ("zstd", "none")):
        raise Unsupported(f"blocks with {footer['block_compression']} and {footer['block_encryption']}")
    footer["blocks"] = [named(BLOCK_ENTRY, array) for array in footer["blocks"]]
    footer["sections"] = [named(SECTION_ENTRY, array) for array in footer["sections"]]
    for section in footer["sections"]:
        known = section["name"] in ("producers", "erased")
        if section["flags"] & ~MUST_UNDERSTAND or (section["flags"] and not known):
            raise Unsupported(f"section {section['name']!r} with flags {section['flags']:#06x}")
    ends = [part["position"] + part["length"] for part in footer["blocks"] + footer["sections"]]
    starts = [part["position"] for part in footer["blocks"] + footer["sections"]]
    require([0, *ends] == [*starts, position], "blocks and sections do not tile the bytes before the footer")
    is_plain = all(block["length"] == block["plain_length"] for block in footer["blocks"])
    require(is_plain or footer["block_compression"] == "zstd", "blocks are compressed although the footer says that none is")
    return footer | {"signatures": unpack(signatures) if signatures else []}


def read_segment(content: bytes, footer: dict[str, Any]) -> Iterator[bytes]:
    """The record batches of a whole segment, each checked."""
    offset = footer["base_offset"]
    for section in footer["sections"]:
        stored = content[section["position"] : section["position"] + section["length"]]
        is_sound = crc32c(stored) == section["crc"] and sha256(stored) == section["sha256"]
        require(is_sound, f"section {section['name']} is damaged")
    for block in footer["blocks"]:
        stored = content[block["position"] : block["position"] + block["length"]]
        require(crc32c(stored) == block["crc"], f"the block at offset {block['base_offset']} does not match its CRC")
        batches = list(split_batches(stored if len(stored) == block["plain_length"] else decompressed(stored, 4)))
        require(sum(map(len, batches)) == block["plain_length"], f"the block at offset {offset} has another plain length")
        for batch in batches:
            base, _, _, _, crc, _, last_delta, *_ = BATCH.unpack_from(batch)
            may_skip = footer.get("compacted") and base > offset
            require(base == offset or may_skip, f"a batch begins at offset {base}; expected {offset}")
            require(crc32c(batch[21:]) == crc, f"the batch at offset {base} does not match its CRC")
            offset = base + last_delta + 1
        leaves = [sha256(b"\x00", batch[:8], batch[12:16], sha256(batch[8:12], batch[16:])) for batch in batches]
        require(merkle_root(leaves) == block["leaves_root"], f"the block at offset {block['base_offset']} has other leaves")
        yield from batches
    require(offset == footer["end_offset"], f"the segment ends at offset {offset}; expected {footer['end_offset']}")


def split_batches(block: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(block):
        size = 12 + struct.unpack_from(">i", block, position + 8)[0]
        require(BATCH.size <= size <= len(block) - position, "a batch has a bad length")
        yield block[position : position + size]
        position += size


def records(batch: bytes) -> Iterator[dict[str, Any]]:
    """The records of one batch (Kafka's RecordBatch, version 2), aborted ones, too; none of a control batch."""
    base, _, epoch, _, _, attributes, _, first_ms, max_ms, _, _, _, count = BATCH.unpack_from(batch)
    if attributes & 0x20:
        return
    reader = Varints(decompressed(batch[BATCH.size :], attributes & 7))
    for _ in range(count):
        reader.varint(), reader.take(1)
        time_delta, offset_delta = reader.varint(), reader.varint()
        timestamp = max_ms if attributes & 8 else first_ms + time_delta
        place = {"offset": base + offset_delta, "timestamp": timestamp, "leader_epoch": epoch}
        content = {"key": reader.sized(), "value": reader.sized()}
        yield {**place, **content, "headers": [(reader.sized() or b"", reader.sized()) for _ in range(reader.varint())]}


def decompressed(content: bytes, codec: int) -> bytes:
    if codec == 1:
        return gzip.decompress(content)
    if codec == 4:
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(content)
    if codec:
        raise Unsupported(f"records compressed with codec {codec}; this reader knows gzip (1) and zstd (4)")
    return content


class Varints(Unpacker):
    """Zigzag varints and the byte strings that they measure."""

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value >> 1 ^ -(value & 1)

    def sized(self) -> bytes | None:
        length = self.varint()
        return None if length < 0 else self.take(length)


def topics(root: Path) -> Iterator[dict[str, Any]]:
    """The newest descriptor of each topic that is not deleted."""
    for directory in sorted(path for path in (root / "topics").iterdir() if path.is_dir()):
        for newest in sorted(directory.glob("*.json"))[:1]:
            topic, marker = json.loads(newest.read_bytes()), directory.with_suffix(".deleted")
            if not marker.exists() or ("detached" in topic and was_undone(json.loads(marker.read_bytes()), topic["detached"])):
                yield topic


def was_undone(marker: dict[str, Any], detached: dict[str, Any]) -> bool:
    """Whether the topic was detached after the deletion had been undone. Then its marker was written late, and is ignored."""
    is_of_same_cluster = marker.get("cluster_id") == detached["cluster_id"]
    return is_of_same_cluster and marker.get("deletion_version", 0) < detached["topic_version"]


def segments(root: Path, topic_id: str, partition: int) -> Iterator[dict[str, Any]]:
    """The live segments of a partition in offset order, from the newest committed root."""
    if not (committed := sorted((root / "manifests" / topic_id / str(partition)).glob("*.[cv]*"))):
        return
    marker = json.loads(committed[0].read_bytes()) if committed[0].suffix == ".committed" else None  # .version: the root itself
    root_object = root / marker["manifest_key"] if marker else committed[0]
    manifest = read_framed(root_object.read_bytes(), bytes.fromhex(marker["sha256"]) if marker else None)
    pages = [read_framed((root / page["key"]).read_bytes(), page["sha256"]) for page in manifest.get("pages", [])]
    listed = [entry for page in pages for entry in page["segments"]] + manifest.get("segments", [])
    offset = manifest["start_offset"]
    for entry in (entry for entry in listed if entry["end_offset"] > offset):
        require(entry["base_offset"] == offset, f"{entry['key']} begins at offset {entry['base_offset']}; expected {offset}")
        yield entry
        offset = entry["end_offset"]
    require(offset == manifest["end_offset"], f"segments end at offset {offset}; expected {manifest['end_offset']}")


def partition_records(root: Path, topic_id: str, partition: int) -> Iterator[dict[str, Any]]:
    for entry in segments(root, topic_id, partition):
        content = (root / entry["key"]).read_bytes()
        require(sha256(content) == entry["object_sha256"], f"{entry['key']} does not match its SHA-256")
        end = entry["footer_position"] + entry["footer_bytes"]
        tail = content[entry["footer_position"] : end]
        require(sha256(tail) == entry["footer_sha256"], f"the footer of {entry['key']} is not the committed one")
        for batch in read_segment(content[entry["data_position"] : end], read_footer(tail)):
            yield from records(batch)


def main(directory: str, topic: str = "") -> None:
    for found in topics(Path(directory)):
        for partition in range(found["partition_count"] if topic in ("", found["name"]) else 0):
            for record in partition_records(Path(directory), found["topic_id"].replace("-", ""), partition):
                line = {"topic": found["name"], "partition": partition, **record}
                print(json.dumps(line, default=lambda content: content.decode(errors="replace")))


if __name__ == "__main__":
    main(*sys.argv[1:])
