"""Record batches: headers, records, codecs, and the kernels that turn them into Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fuzz import seals
from fuzz.target import MIB, Target
from stratalog_core.batches.batch import check_batch, iterate_headers
from stratalog_core.batches.compression import DECOMPRESSED_BYTES_MAX, NAMES, compress, decompress
from stratalog_core.batches.records import Record, build_batch, decode_varint, iterate_records
from stratalog_pipeline.arrow.decode import BatchDecoder
from stratalog_pipeline.arrow.kernels import Room
from stratalog_pipeline.arrow.schema import COLUMNS_WITH_HEADERS

UNPACKED_BYTES_MAX = 256 * 1024
BOUNDS = (Room(rows=10, data_bytes=512, headers=8), Room(rows=1000, data_bytes=64 * 1024, headers=1000))


def sound_batches() -> list[bytes]:
    """One batch of each codec; one with nulls, headers and gaps; one of a producer."""
    records = [
        Record(offset=7, timestamp_ms=1_000, key=b"key", value=b"value" * 10, headers=(("name", b"content"), ("none", None))),
        Record(offset=9, timestamp_ms=900, key=None, value=None),
        Record(offset=10, timestamp_ms=2_000, key=b"", value=b"\xff\x00", headers=(("n\u00e4me", b""),)),
    ]
    made = [build_batch(records, compression=codec) for codec in NAMES.values()]
    made.append(build_batch(records[:1], producer_id=5, producer_epoch=1, base_sequence=3))
    made.append(build_batch(records, attributes=0x08, compression=4))
    made.append(build_batch(records[:1], attributes=0x20))
    return [bytes(batch) for batch in made]


def runs() -> list[bytes]:
    batches = sound_batches()
    return [seals.sealed(run) for run in (*batches, b"".join(batches[:3]))]


def read_records(content: bytes) -> None:
    run = memoryview(seals.opened(content, seals.batches))
    decode_varint(run, 0)
    for position, header in iterate_headers(run):
        batch = run[position : position + header.size_bytes]
        check_batch(batch)
        for _ in iterate_records(batch, header):
            pass


def unpack(content: bytes) -> None:
    """The first byte is the codec's number."""
    result = decompress(content[0] if content else 0, content[1:], UNPACKED_BYTES_MAX)
    assert len(result) <= UNPACKED_BYTES_MAX, "never more than what was allowed"


def packed() -> Sequence[bytes]:
    texts = (b"", b"record " * 40, bytes(MIB))
    made = [bytes((codec,)) + compress(codec, text) for codec in NAMES.values() if codec for text in texts]
    return [one for one in made if len(one) < 2000]


def decode_for_spark(content: bytes, bounds: Room) -> None:
    decoder = BatchDecoder(topic="flights", partition=3, columns=COLUMNS_WITH_HEADERS, first_offset=8, bounds=bounds)
    run = seals.opened(content, seals.batches)
    for made in (*decoder.decode(run), *decoder.finish()):
        made.validate(full=True)


UNPACKED = 3 * DECOMPRESSED_BYTES_MAX
"""Maximum that a small batch may unpack to, pieces and whole together."""
TARGETS = (
    Target(name="record-batch", run=read_records, seeds=runs, allocated_bytes_max=UNPACKED),
    Target(name="compression", run=unpack, seeds=packed, allocated_bytes_max=2 * MIB),
    Target(name="spark-batch", run=partial(decode_for_spark, bounds=BOUNDS[1]), seeds=runs, allocated_bytes_max=UNPACKED),
    Target(name="spark-batch-small", run=partial(decode_for_spark, bounds=BOUNDS[0]), seeds=runs, allocated_bytes_max=UNPACKED),
)
