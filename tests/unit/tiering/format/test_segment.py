"""Segments: what is written is read back, every flipped byte is found and located, offsets never gap."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.batches.batch import TIMESTAMP_TYPE_BIT
from stratalog_core.batches.checkpoint import ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid, StratalogError
from stratalog_tiering.format.footer import (
    COMPACTED,
    MAGIC,
    MUST_UNDERSTAND,
    PRODUCERS,
    TRAILER_BYTES,
    Signature,
    check_footer,
    describe_section,
    encode_footer,
    locate_footer,
    parse_producers,
    parse_signatures,
)
from stratalog_tiering.format.merkle import batch_leaf, inclusion_proof, proof_holds, root_hash, split_hashes
from stratalog_tiering.format.segment import (
    SegmentFooter,
    SegmentIdentity,
    SegmentWriter,
    WrittenSegment,
    audit_block,
    find_block,
    iterate_block_batches,
    parse_footer,
    plain_block,
)

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")


def identity(base_offset: int = 0) -> SegmentIdentity:
    return SegmentIdentity(
        cluster_id="c", topic_id=TOPIC, topic_name="flights", partition=3, base_offset=base_offset, ledger_ids=(7, 8)
    )


def make_batches(base_offset: int, counts: list[int], epochs: list[int] | None = None) -> list[bytes]:
    batches, offset = [], base_offset
    for index, count in enumerate(counts):
        records = [
            Record(offset=offset + step, timestamp_ms=1000 + (offset * 37 + step) % 501, key=b"k", value=b"v" * (step % 50))
            for step in range(count)
        ]
        batches.append(bytes(build_batch(records, leader_epoch=epochs[index] if epochs else 0)))
        offset += count
    return batches


def write(
    batches: list[bytes], base_offset: int = 0, block_bytes: int = 300, zstd_level: int | None = None
) -> tuple[bytes, WrittenSegment]:
    writer = SegmentWriter(identity(base_offset), block_bytes, zstd_level)
    content = bytearray()
    for batch in batches:
        writer.append(batch)
        content += b"".join(writer.take_parts())
    written = writer.finish(created_at_ms=5)
    return bytes(content + b"".join(writer.take_parts())), written


def write_segment(
    batches: list[bytes], base_offset: int = 0, block_bytes: int = 300, zstd_level: int | None = None
) -> tuple[bytes, SegmentFooter]:
    content, written = write(batches, base_offset, block_bytes, zstd_level)
    return content, written.footer


LEVELS = st.sampled_from([None, 1, 19])


@given(st.integers(0, 2**40), st.lists(st.integers(1, 12), min_size=1, max_size=25), st.integers(1, 4000), LEVELS)
def test_the_result_describes_the_object(base_offset: int, counts: list[int], block_bytes: int, zstd_level: int | None) -> None:
    batches = make_batches(base_offset, counts)
    content, written = write(batches, base_offset, block_bytes, zstd_level)
    assert (written.object_bytes, written.sha256) == (len(content), sha256(content).digest())
    footer = content[written.footer_position : written.footer_position + written.footer_length]
    assert written.footer_sha256 == sha256(footer).digest()
    assert parse_footer(footer, len(content)) == written.footer
    assert list(split_hashes(written.leaves)) == [batch_leaf(batch) for batch in batches]


def test_the_minimum_timestamp_is_true_or_unknown() -> None:
    def batch(offset: int, *times: int, attributes: int = 0) -> bytes:
        records = [Record(offset=offset + n, timestamp_ms=ms, key=None, value=b"") for n, ms in enumerate(times)]
        return bytes(build_batch(records, attributes=attributes))

    assert write([batch(0, 50), batch(1, 40), batch(2, 60)])[1].min_timestamp_ms == 40
    assert write([batch(0, 50), batch(1, 40, 30)])[1].min_timestamp_ms is None, (
        "the header says nothing about the second record"
    )
    assert write([batch(0, 50, 50, attributes=TIMESTAMP_TYPE_BIT)])[1].min_timestamp_ms == 50


@given(st.integers(0, 2**40), st.lists(st.integers(1, 12), min_size=1, max_size=25), st.integers(1, 4000), LEVELS)
def test_batches_come_back_as_they_were(base_offset: int, counts: list[int], block_bytes: int, zstd_level: int | None) -> None:
    batches = make_batches(base_offset, counts)
    content, written = write_segment(batches, base_offset, block_bytes, zstd_level)
    footer = parse_footer(content, len(content))
    assert footer == written
    assert zstd_level is not None or content[: footer.data_bytes] == b"".join(batches)
    read = []
    for block in footer.blocks:
        stored = content[block.position : block.end_position]
        assert audit_block(stored, block) == plain_block(stored, block)
        assert block.length <= block.plain_length
        assert block.batch_count == 1 or block.plain_length <= block_bytes
        read += [bytes(batch) for batch, _ in iterate_block_batches(plain_block(stored, block))]
    assert read == batches
    assert (footer.end_offset, footer.record_count) == (base_offset + sum(counts), sum(counts))


@settings(max_examples=300)
@given(st.data())
def test_any_flipped_bit_is_found_in_its_block_or_in_the_tail(data: st.DataObject) -> None:
    content, footer = write_segment(make_batches(40, [3, 9, 1, 12, 5]), 40, zstd_level=data.draw(LEVELS))
    position = data.draw(st.integers(0, len(content) - 1))
    spoiled = bytearray(content)
    spoiled[position] ^= 1 << data.draw(st.integers(0, 7))
    if position >= footer.data_bytes:
        with pytest.raises(StratalogError):
            parse_footer(spoiled, len(spoiled))
        return
    wrong = []
    for index, block in enumerate(parse_footer(spoiled, len(spoiled)).blocks):
        try:
            audit_block(spoiled[block.position : block.end_position], block)
        except Corrupt:
            wrong.append(index)
    assert wrong == [next(i for i, block in enumerate(footer.blocks) if position < block.end_position)]


@given(st.integers(0, 400))
def test_a_cut_object_is_never_a_segment(kept: int) -> None:
    content, _ = write_segment(make_batches(0, [5, 5]))
    kept = min(kept, len(content) - 1)
    with pytest.raises(Corrupt):
        parse_footer(content[:kept], kept)


def test_the_footer_is_read_by_two_ranges() -> None:
    content, footer = write_segment(make_batches(0, [5, 5]))
    located = locate_footer(content[-TRAILER_BYTES:], len(content))
    assert (located.position, located.position + located.tail_bytes) == (footer.position, len(content))
    assert parse_footer(content[footer.position :], len(content)) == footer
    with pytest.raises(Invalid, match="do not hold the whole footer"):
        parse_footer(content[-TRAILER_BYTES:], len(content))


def with_trailer(content: bytes, at: int, field: bytes) -> bytes:
    """The segment with other bytes in its trailer, whose CRC is made to match."""
    trailer = bytearray(content[-TRAILER_BYTES:])
    trailer[at : at + len(field)] = field
    trailer[28:32] = crc32c(bytes(trailer[:28])).to_bytes(4, "big")
    return content[:-TRAILER_BYTES] + bytes(trailer)


@pytest.mark.parametrize(("version", "remedy"), [(1, "use an empty bucket"), (3, "upgrade it")])
def test_other_versions_are_refused(version: int, remedy: str) -> None:
    content = with_trailer(write_segment(make_batches(0, [5]))[0], 24, version.to_bytes(2, "big"))
    with pytest.raises(Invalid, match=f"version {version}.*this release reads 2.*{remedy}"):
        parse_footer(content, len(content))


@given(st.integers(2, 0xFFFF))
def test_every_flag_of_a_trailer_must_be_understood(flags: int) -> None:
    content = with_trailer(write_segment(make_batches(0, [5]))[0], 26, flags.to_bytes(2, "big"))
    unknown = flags & ~COMPACTED
    with pytest.raises(Invalid, match=f"segment trailer has flags {flags:#06x}; this release does not know {unknown:#06x}"):
        parse_footer(content, len(content))


def test_footer_and_trailer_agree_in_whether_the_segment_is_compacted() -> None:
    content = with_trailer(write_segment(make_batches(0, [5]))[0], 26, COMPACTED.to_bytes(2, "big"))
    with pytest.raises(Corrupt, match="differ in whether the segment is compacted"):
        parse_footer(content, len(content))


@given(
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=12), zstd=st.booleans(),
    block_bytes=st.integers(1, 600),
)  # fmt: skip
def test_a_compacted_segment_covers_its_gaps(gaps: list[tuple[int, int]], *, zstd: bool, block_bytes: int) -> None:
    batches, offset = list[bytes](), 40
    for gap, count in gaps:
        batches += make_batches(offset + gap, [count])
        offset += gap + count
    writer = SegmentWriter(identity(40), block_bytes, 3 if zstd else None, is_compacted=True)
    for batch in batches:
        writer.append(batch)
    written = writer.finish(created_at_ms=5)
    content = b"".join(writer.take_parts())
    footer = parse_footer(content, len(content))
    assert (footer.is_compacted, footer.base_offset, footer.end_offset) == (True, 40, offset)
    assert writer.first_batch_offset == 40 + gaps[0][0]
    assert len(written.leaves) == 32 * len(batches)
    found = list[bytes]()
    for block in footer.blocks:
        plain = audit_block(content[block.position : block.end_position], block, is_compacted=True)
        found += [bytes(batch) for batch, _ in iterate_block_batches(plain)]
    assert found == batches
    for wanted in range(40, offset):
        block = footer.blocks[find_block(footer.blocks, wanted)]
        assert block.base_offset <= wanted <= block.last_offset


def test_batches_of_a_compacted_segment_ascend() -> None:
    writer = SegmentWriter(identity(0), is_compacted=True)
    writer.append(make_batches(5, [3])[0])
    with pytest.raises(Corrupt, match="does not continue at 8"):
        writer.append(make_batches(7, [3])[0])


def test_gaps_are_damage_in_a_segment_that_is_not_compacted() -> None:
    writer = SegmentWriter(identity(0), is_compacted=True)
    for base in (5, 20):
        writer.append(make_batches(base, [3])[0])
    (block,) = writer.finish(created_at_ms=5).footer.blocks
    content = b"".join(writer.take_parts())[: block.end_position]
    audit_block(content, block, is_compacted=True)
    with pytest.raises(Corrupt, match="batch begins at offset 5; expected 0"):
        audit_block(content, block)


@pytest.mark.parametrize(("member", "value"), [("block_compression", "lz4"), ("block_encryption", "aes-512-gcm")])
def test_an_unknown_transformation_of_blocks_is_refused(member: str, value: str) -> None:
    footer = write_segment(make_batches(0, [5]))[1]
    with pytest.raises(Invalid, match=f"{member.replace('_', ' ')} '{value}'.*upgrade it"):
        check_footer(msgspec.structs.replace(footer, **{member: value}), footer.position)


@pytest.mark.parametrize(
    "change", [{"plain_length": 1}, {"nonce": b"n"}, {"leaves_root": b""}, {"min_timestamp_ms": 1}, {"max_timestamp_ms": 9999}]
)
def test_a_block_that_contradicts_its_footer_is_damage(change: dict[str, Any]) -> None:
    footer = write_segment(make_batches(0, [1]))[1]
    block = msgspec.structs.replace(footer.blocks[0], **change)
    with pytest.raises(Corrupt):
        check_footer(msgspec.structs.replace(footer, blocks=(block,)), footer.position)


def test_a_section_is_skipped_unless_it_must_be_understood() -> None:
    content, footer = write_segment(make_batches(0, [5, 5]))

    def with_section(flags: int) -> bytes:
        section = describe_section("novelty", b"abc", footer.data_bytes, flags)
        tail = msgspec.structs.replace(footer, sections=(section,))
        return content[: footer.data_bytes] + b"abc" + bytes(_encoded_unchecked(tail))

    skipped = with_section(0)
    assert parse_footer(skipped, len(skipped)).blocks == footer.blocks
    for flags, message in ((MUST_UNDERSTAND, "section 'novelty', which a reader must"), (0x8000, "does not know 0x8000")):
        refused = with_section(flags)
        with pytest.raises(Invalid, match=message):
            parse_footer(refused, len(refused))


def _encoded_unchecked(footer: SegmentFooter) -> bytes:
    """Build a segment as a later release may write it: with more sections and flags."""
    body = msgspec.msgpack.encode(footer)
    head = struct.pack(">QIIIIHH", footer.position, len(body), crc32c(body), 0, 0, 2, 0)
    return body + head + crc32c(head).to_bytes(4, "big") + MAGIC


def test_producers_are_in_a_section_of_their_own() -> None:
    producers = tuple(ProducerEntry(number, 1, (SequencedBatch(0, 1, number, 5),)) for number in range(3))
    writer = SegmentWriter(identity())
    writer.append(make_batches(0, [5])[0])
    written = writer.finish(created_at_ms=5, producers=producers)
    content = b"".join(map(bytes, writer.take_parts()))
    section = parse_footer(content[written.footer_position :], len(content)).section(PRODUCERS)
    assert section is not None
    assert parse_producers(content[section.position : section.end_position], section) == producers
    spoiled = bytearray(content[section.position : section.end_position])
    spoiled[-1] ^= 1
    with pytest.raises(Corrupt, match="section 'producers'"):
        parse_producers(spoiled, section)


def test_signatures_of_any_kind_are_read_past() -> None:
    content, footer = write_segment(make_batches(0, [5]))
    signatures = (
        Signature(algorithm="ed25519", key_id="a", value=bytes(64)),
        Signature(algorithm="ml-dsa-87", key_id="b", value=bytes(4627)),
    )
    signed = content[: footer.position] + encode_footer(footer, signatures)
    assert parse_footer(signed, len(signed)) == footer
    assert parse_signatures(signed[footer.position :], len(signed)) == signatures


def test_a_batch_has_the_same_leaf_in_every_segment() -> None:
    batches = make_batches(0, [3, 9, 1, 12, 5])
    merged = write(batches, block_bytes=500)[1].leaves
    parts = [write([batch], base)[1].leaves for batch, base in zip(batches, (0, 3, 12, 13, 25), strict=True)]
    assert merged == b"".join(parts)
    leaves = list(split_hashes(merged))
    for index, batch in enumerate(batches):
        proof = inclusion_proof(leaves, index)
        assert proof_holds(root_hash(leaves), batch_leaf(batch), index, len(leaves), proof)


def test_a_gap_or_overlap_is_refused() -> None:
    for wrong in (4, 6):
        writer = SegmentWriter(identity())
        writer.append(make_batches(0, [5])[0])
        with pytest.raises(Corrupt, match="does not continue at 5"):
            writer.append(make_batches(wrong, [1])[0])


def test_no_empty_segment_and_no_half_batch() -> None:
    writer = SegmentWriter(identity())
    with pytest.raises(Invalid):
        writer.finish(created_at_ms=0)
    with pytest.raises(Corrupt):
        writer.append(make_batches(0, [5])[0][:-1])


def test_leader_epochs_are_taken_from_the_batches() -> None:
    _, footer = write_segment(make_batches(10, [2, 3, 4], epochs=[4, 4, 9]), 10)
    assert [(start.epoch, start.start_offset) for start in footer.leader_epochs] == [(4, 10), (9, 15)]


@given(st.integers(0, 200))
def test_find_block_equals_a_scan(offset: int) -> None:
    _, footer = write_segment(make_batches(20, [7] * 15), 20, 200)
    holding = [i for i, block in enumerate(footer.blocks) if block.base_offset <= offset <= block.last_offset]
    if holding:
        assert find_block(footer.blocks, offset) == holding[0]
    else:
        with pytest.raises(IndexError):
            find_block(footer.blocks, offset)
