"""Codecs: what goes in comes out, and neither damage nor a bomb gets further than ``Corrupt``."""

from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.batches.compression import (
    DECOMPRESSED_BYTES_MAX,
    GZIP,
    LZ4,
    NAMES,
    NONE,
    SNAPPY,
    ZSTD,
    compress,
    compressor,
    decompress,
    decompression_bytes,
)
from stratalog_core.errors import Corrupt, Invalid

CODECS = tuple(NAMES.values())
PACKED = tuple(codec for codec in CODECS if codec != NONE)
contents = st.binary(max_size=2000) | st.builds(
    lambda piece, times: piece * times, st.binary(max_size=9), st.integers(0, 50_000)
)


@settings(deadline=None)
@given(st.sampled_from(CODECS), contents)
def test_content_comes_back(codec: int, content: bytes) -> None:
    assert decompress(codec, compress(codec, content)) == content
    assert decompress(codec, memoryview(compress(codec, bytearray(content)))) == content


@settings(deadline=None)
@given(st.sampled_from(PACKED), st.lists(contents, max_size=4))
def test_a_compressor_that_is_used_again_makes_the_same_bytes(codec: int, pieces: list[bytes]) -> None:
    compressed_again = compressor(codec)
    assert [compressed_again(piece) for piece in pieces] == [compress(codec, piece) for piece in pieces]


@settings(deadline=None)
@given(st.sampled_from(CODECS), contents, st.integers(1, 200_000))
def test_the_limit_is_exact(codec: int, content: bytes, limit_bytes: int) -> None:
    packed = compress(codec, content)
    if len(content) <= limit_bytes:
        assert decompress(codec, packed, limit_bytes) == content
    else:
        with pytest.raises(Corrupt, match="limit"):
            decompress(codec, packed, limit_bytes)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(PACKED), st.binary(max_size=300))
def test_arbitrary_bytes_give_bytes_or_corrupt(codec: int, noise: bytes) -> None:
    with contextlib.suppress(Corrupt):
        assert isinstance(decompress(codec, noise, 1_000_000), bytes)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(PACKED), st.binary(min_size=1, max_size=500), st.data())
def test_damaged_bytes_give_bytes_or_corrupt(codec: int, content: bytes, data: st.DataObject) -> None:
    packed = bytearray(compress(codec, content))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Corrupt):
        assert isinstance(decompress(codec, packed, 1_000_000), bytes)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["sized", "unsized", "skippable"]), contents), min_size=1, max_size=4))
def test_several_zstd_frames_are_one_content(frames: list[tuple[str, bytes]]) -> None:
    """Of one frame that states its size, in one call; of everything else, by a stream."""
    packed, whole = b"", b""
    for kind, content in frames:
        if kind == "skippable":
            packed += (0x184D2A50).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content
            continue
        packed += zstandard.ZstdCompressor(write_content_size=kind == "sized").compress(content)
        whole += content
    assert decompress(ZSTD, packed) == whole


@pytest.mark.parametrize("claimed_bytes", [DECOMPRESSED_BYTES_MAX + 1, 2**63 + 41])
def test_a_zstd_window_over_the_limit_is_refused(claimed_bytes: int) -> None:
    single_segment_of_eight_size_bytes = b"\x28\xb5\x2f\xfd\xe0"
    frame = single_segment_of_eight_size_bytes + claimed_bytes.to_bytes(8, "little") + b"\x01\x00\x00"
    assert decompression_bytes(ZSTD, frame) < 2 * DECOMPRESSED_BYTES_MAX
    with pytest.raises(Corrupt):
        decompress(ZSTD, frame)


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_a_cut_is_noticed(codec: int, size: int) -> None:
    packed = compress(codec, bytes(range(256)) * (size // 256 + 1))
    for kept in (1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(Corrupt):
            decompress(codec, packed[:kept])


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("content", [b"", b"abc", bytes(300_000), random.Random(1).randbytes(300_000)])
def test_a_cut_of_a_zstd_frame_is_noticed_wherever_it_is(content: bytes, sized: bool, checksum: bool) -> None:
    """The library's stream ends without an error where the bytes end. The frame may be the second one."""
    packed = zstandard.ZstdCompressor(write_content_size=sized, write_checksum=checksum).compress(content)
    skippable = (0x184D2A51).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"12345"
    first = zstandard.ZstdCompressor().compress(b"first")
    cuts = {*range(1, min(len(packed), 40)), *range(1, len(packed), 997), len(packed) - 1}
    for before in (b"", skippable, first):
        assert decompress(ZSTD, before + packed) == (b"first" if before == first else b"") + content
        for kept in cuts:
            with pytest.raises(Corrupt, match=r"does not decompress|are cut short"):
                decompress(ZSTD, before + packed[:kept])
    for kept in range(1, len(skippable)):
        with pytest.raises(Corrupt, match="are cut short"):
            decompress(ZSTD, packed + skippable[:kept])


@pytest.mark.parametrize("codec", PACKED)
def test_a_bomb_costs_no_more_memory_than_a_few_times_the_limit(codec: int) -> None:
    bomb, limit_bytes = compress(codec, bytes(64 * 1024 * 1024)), 1024 * 1024
    tracemalloc.start()
    with pytest.raises(Corrupt, match="limit"):
        decompress(codec, bomb, limit_bytes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * limit_bytes


def test_what_other_clients_write_is_read() -> None:
    content = b"some content " * 3000
    assert decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(content))) == content
    assert decompress(GZIP, gzip.compress(content)) == content
    assert decompress(LZ4, lz4.frame.compress(content, block_linked=False, store_size=False)) == content
    streamed = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    assert decompress(ZSTD, streamed.compress(content) + streamed.flush()) == content
    frame = zstandard.ZstdCompressor().compress(content)
    assert decompress(ZSTD, frame + frame) == content * 2


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(Invalid, match="codec 5"):
        compress(5, b"x")
    with pytest.raises(Corrupt, match="codec 7"):
        decompress(7, b"x")
