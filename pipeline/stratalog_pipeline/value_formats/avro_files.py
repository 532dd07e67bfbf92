"""Avro's object container files, cut into splits at their sync markers. Files are opened by Arrow's file systems.

A block belongs to the split within whose bytes it begins, so every block is read once however the file is cut.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final
from urllib.parse import urlsplit

import cramjam
import fastavro
import pyarrow as pa
import zstandard
from pyarrow import fs

from stratalog_core.errors import Corrupt, Invalid, NotFound
from stratalog_pipeline.value_formats.avro import DECODING_ERRORS, Schema, arrow_type, parse_schema, same_schema

SPLIT_BYTES: Final = 64 * 1024 * 1024
BLOCK_BYTES_MAX: Final = 1 << 30
ROWS_MAX: Final = 10_000
_SYNC_BYTES: Final = 16
_SCAN_BYTES: Final = 1024 * 1024
_MAGIC: Final = b"Obj\x01"
_HEADER_BYTES: Final = (64 * 1024, 16 * 1024 * 1024)
"""As much is read of a header at first, and at most."""
_FRAME_BYTES_MAX: Final = 20
"""Two integers of 64 bits, of up to ten bytes each."""
_LONG: Final = fastavro.parse_schema("long")
_HEADER: Final = fastavro.parse_schema(
    {
        "type": "record", "name": "org.apache.avro.file.Header", "fields": [
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "Sync", "size": _SYNC_BYTES}},
        ],
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSplit:
    """Bytes of one file: ``start`` inclusive, ``end`` exclusive."""

    path: str
    start: int
    end: int


def find_splits(paths: Sequence[str], split_bytes: int = SPLIT_BYTES) -> list[tuple[FileSplit, ...]]:
    """Return the splits of all files, those of each task together: about ``split_bytes``, small files joined.

    A path is a file, or a directory whose files ``*.avro`` at any depth are taken, as a local path or a URL of Arrow's
    (``s3://…``, ``gs://…``, ``hdfs://…``). Raises ``NotFound``, and ``Invalid`` for a URL that Arrow does not know.
    """
    tasks: list[tuple[FileSplit, ...]] = []
    joined: list[FileSplit] = []
    joined_bytes = 0
    for path, size in _files(paths):
        for start in range(0, max(size, 1), split_bytes):
            split = FileSplit(path=path, start=start, end=min(start + split_bytes, size))
            if joined and joined_bytes + split.end - start > split_bytes:
                tasks.append(tuple(joined))
                joined, joined_bytes = [], 0
            joined.append(split)
            joined_bytes += split.end - start
    return [*tasks, tuple(joined)]


def read_schema(path: str) -> Schema:
    """Return the schema that a file was written with. Raises ``Invalid`` if it is none of Avro's, and ``NotFound``."""
    with _open(path) as file:
        return _header(file, path).schema


def read_splits(splits: Sequence[FileSplit], reader: Schema, *, must_be_same: bool) -> Iterator[pa.RecordBatch]:
    """Yield the records of ``splits`` as ``reader`` describes them.

    ``must_be_same`` refuses a file with another schema, whose other fields would be left out. Raises ``Corrupt`` with path and
    block, ``Invalid``, ``NotFound``.
    """
    kind = arrow_type(reader)
    if not pa.types.is_struct(kind):
        raise Invalid(f"the schema describes {kind}, not records with fields")
    for split in splits:
        with _open(split.path) as file:
            header = _header(file, split.path)
            if must_be_same and not same_schema(header.schema, reader):
                raise Invalid(f"{split.path} has another schema than the first file; name one for all with --avro-schema")
            for count, content, position in _blocks(file, split, header):
                place = f"{split.path}, block at byte {position}"
                for first in range(0, count, ROWS_MAX):
                    rows = _rows(content, min(ROWS_MAX, count - first), header.schema, None if must_be_same else reader, place)
                    yield _batch(rows, kind, place)


def _files(paths: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield path and size of every file, in the order of paths, then names."""
    for path in paths:
        system, inside = _system(path)
        info = system.get_file_info(inside)
        if info.type == fs.FileType.File:
            yield path, info.size
            continue
        below = system.get_file_info(fs.FileSelector(inside, recursive=True, allow_not_found=True))
        found = sorted((each.path, each.size) for each in below if _is_data(each, inside))
        if not found:
            raise NotFound(f"{path} has no file *.avro")
        for name, size in found:
            yield path.rstrip("/") + name.removeprefix(inside.rstrip("/")), size


def _is_data(info: fs.FileInfo, root: str) -> bool:
    """Whether it is a file to read. Names with a leading ``_`` or ``.`` are those of writers, as for Spark."""
    parts = info.path.removeprefix(root.rstrip("/")).strip("/").split("/")
    hidden = any(part.startswith(("_", ".")) for part in parts)
    return bool(info.type == fs.FileType.File) and info.path.endswith(".avro") and not hidden


def _system(path: str) -> tuple[fs.FileSystem, str]:
    if not urlsplit(path).scheme:
        return fs.LocalFileSystem(), path
    try:
        system, inside = fs.FileSystem.from_uri(path)
        return system, str(inside)
    except (pa.ArrowInvalid, ImportError) as unknown:
        raise Invalid(f"{path} cannot be opened: {unknown}") from unknown


def _open(path: str) -> Any:
    system, inside = _system(path)
    try:
        return system.open_input_file(inside)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    schema: Schema
    codec: str
    sync: bytes
    bytes: int


def _header(file: Any, path: str) -> _Header:
    for limit in _HEADER_BYTES:
        file.seek(0)
        stream = BytesIO(file.read(limit))
        try:
            if stream.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("it does not begin with Obj\\x01")
            found = fastavro.schemaless_reader(stream, _HEADER)
            schema, codec = parse_schema(found["meta"]["avro.schema"]), found["meta"].get("avro.codec", b"null").decode()
            break
        except EOFError as longer:
            reason: Exception = longer
        except (*DECODING_ERRORS, MemoryError) as malformed:
            raise Invalid(f"{path} is not an Avro file: {malformed}") from malformed
    else:
        raise Invalid(f"{path} is not an Avro file: {reason}") from reason
    if codec not in _PLAIN:
        raise Invalid(f"{path} is compressed by {codec!r}; known are {', '.join(_PLAIN)}")
    return _Header(schema=schema, codec=codec, sync=found["sync"], bytes=stream.tell())


def _blocks(file: Any, split: FileSplit, header: _Header) -> Iterator[tuple[int, BytesIO, int]]:
    """Yield the blocks that begin within the split: number of records, plain content, position."""
    position: int | None = header.bytes
    if split.start > header.bytes:
        position = _after_sync(file, split.start - _SYNC_BYTES, header.sync)
    while position is not None and position < split.end:
        file.seek(position)
        try:
            frame = BytesIO(file.read(_FRAME_BYTES_MAX))
            count, size = (fastavro.schemaless_reader(frame, _LONG) for _ in range(2))
            if count < 0 or not 0 <= size <= BLOCK_BYTES_MAX:
                raise ValueError(f"{count} records in {size} bytes; maximum is {BLOCK_BYTES_MAX} bytes")
            file.seek(position + frame.tell())
            content = file.read(size)
            if len(content) != size or file.read(_SYNC_BYTES) != header.sync:
                raise ValueError(f"no sync marker follows its {size} bytes")
            plain = _PLAIN[header.codec](content)
        except (*DECODING_ERRORS, *_CODEC_ERRORS, MemoryError) as damaged:
            raise Corrupt(f"{split.path}, block at byte {position}: {damaged}") from damaged
        yield count, BytesIO(plain), position
        position += frame.tell() + size + _SYNC_BYTES


def _snappy(content: bytes) -> bytes:
    plain = bytes(cramjam.snappy.decompress_raw(content[:-4]))
    if zlib.crc32(plain) != int.from_bytes(content[-4:], "big"):
        raise ValueError("its content does not match its CRC")
    return plain


_PLAIN: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "null": lambda content: content,
    "deflate": lambda content: zlib.decompress(content, -zlib.MAX_WBITS),
    "snappy": _snappy,
    "bzip2": bz2.decompress,
    "xz": lzma.decompress,
    "zstandard": lambda content: zstandard.ZstdDecompressor().decompressobj().decompress(content),
}
_CODEC_ERRORS: Final = (zlib.error, lzma.LZMAError, OSError, zstandard.ZstdError, cramjam.DecompressionError)


def _after_sync(file: Any, position: int, sync: bytes) -> int | None:
    """Return the position after the first sync marker that begins at ``position`` or later; None if there is none."""
    file.seek(position)
    window: bytes = b""
    while True:
        more = file.read(_SCAN_BYTES)
        if not more:
            return None
        window += more
        if (found := window.find(sync)) >= 0:
            return int(position + found + _SYNC_BYTES)
        position += max(0, len(window) - _SYNC_BYTES + 1)
        window = window[-_SYNC_BYTES + 1 :]


def _rows(content: BytesIO, count: int, writer: Schema, reader: Schema | None, place: str) -> list[Any]:
    try:
        return [fastavro.schemaless_reader(content, writer, reader) for _ in range(count)]
    except fastavro.read.SchemaResolutionError as different:
        raise Invalid(f"{place}: the given schema cannot read it: {different}") from different
    except (*DECODING_ERRORS, MemoryError) as damaged:
        raise Corrupt(f"{place}: {damaged!r}") from damaged


def _batch(rows: list[Any], kind: pa.StructType, place: str) -> pa.RecordBatch:
    try:
        return pa.RecordBatch.from_struct_array(pa.array(rows, kind))
    except (pa.ArrowException, OverflowError) as unfit:
        raise Corrupt(f"{place}: a value does not fit into its type: {unfit}") from unfit
