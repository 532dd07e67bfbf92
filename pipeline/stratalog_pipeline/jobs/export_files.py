"""Writes the files of an export: the task's half. A file that is there already is compared with the bucket instead."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stratalog_core.errors import Conflict, Corrupt
from stratalog_pipeline.arrow.schema import ARROW_TYPES
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.export_journal import PlannedFile, WrittenFile
from stratalog_pipeline.planning import Split
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.value_formats.values import CORRUPT_RECORD, Values
from stratalog_tiering.offload.upload import StreamedUpload

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
PART_BYTES: Final = 8 * 1024 * 1024
PARTS_AT_ONCE: Final = 2
Agrees: TypeAlias = Callable[[Iterable[pa.Table], Iterable[pa.Table], PlannedFile], bool]
"""Whether the row groups of a file are those of the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTask:
    """One file to write: where its records are, and how they are read. ``verify``: read the file back and compare."""

    file: PlannedFile
    split: Split
    columns: tuple[str, ...]
    read_committed: bool
    verify: bool
    values: Values | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the file."""
        types = typed_columns(self.values)
        return pa.schema([(name, types[name]) for name in self.columns])


def typed_columns(values: Values | None) -> dict[str, pa.DataType]:
    """Return the type of each column that a file may have."""
    if values is None:
        return ARROW_TYPES
    return {**ARROW_TYPES, "value": values.kind(), **({CORRUPT_RECORD: pa.binary()} if values.is_permissive else {})}


def write_file(bucket: Bucket, out: Bucket, task: FileTask) -> WrittenFile:
    """Write one file, unless an earlier attempt has. Raises ``Corrupt`` if it does not hold what the bucket does."""
    with _Upload(out, task.file.key) as upload:
        records, schema = 0, task.schema
        with pq.ParquetWriter(upload, schema.with_metadata(_about(task.file)), compression="zstd") as writer:
            for rows in _row_groups(bucket, task):
                records += rows.num_rows
                writer.write_table(rows.cast(schema), row_group_size=max(rows.num_rows, 1))
    if upload.was_there or task.verify:
        return _read_back(bucket, out, task, _holds if upload.was_there and _may_have_lost_records(task) else _equals)
    return _written(task.file, records, upload.size_bytes, upload.sha256)


def _about(file: PlannedFile) -> dict[str, str]:
    return {"stratalog.topic_id": str(file.topic_id), "stratalog.first": str(file.first), "stratalog.end": str(file.end)}


def _row_groups(bucket: Bucket, task: FileTask) -> Iterator[pa.Table]:
    """Yield the file's rows in pieces of about ``ROW_GROUP_BYTES``; the same at every attempt."""
    run: list[pa.RecordBatch] = []
    run_bytes = 0
    for batch in _rows(bucket, task):
        run.append(batch)
        run_bytes += batch.nbytes
        if run_bytes >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(run)
            run, run_bytes = [], 0
    if run:
        yield pa.Table.from_batches(run)


def _rows(bucket: Bucket, task: FileTask) -> Iterator[pa.RecordBatch]:
    if task.values is None:
        return scan_split(bucket, task.split, task.columns, read_committed=task.read_committed)
    stored = task.values.read_columns(task.columns)
    return task.values.columns(task.columns, scan_split(bucket, task.split, stored, read_committed=task.read_committed))


def _may_have_lost_records(task: FileTask) -> bool:
    """Whether the bucket may have fewer records than when an earlier attempt wrote the file.

    Retention removes whole segments from the start, compactions and erasures replace segments by ones with fewer records.
    """
    segments = [piece.segment for piece in task.split.slices]
    is_cut = not segments or segments[0].base_offset > task.file.first
    return is_cut or any(segment.is_compacted or segment.is_erased for segment in segments)


def _read_back(bucket: Bucket, out: Bucket, task: FileTask, agrees: Agrees) -> WrittenFile:
    """Compare the stored file with the bucket, row by row."""
    content = out.run(out.store.get(task.file.key))
    try:
        stored = pq.ParquetFile(pa.BufferReader(content))
        schema = task.schema
        wanted = (_comparable(rows.cast(schema)) for rows in _row_groups(bucket, task))
        groups = (_comparable(stored.read_row_group(number).cast(schema)) for number in range(stored.num_row_groups))
        is_sound = agrees(groups, wanted, task.file)
    except (pa.ArrowException, ValueError) as bad:
        raise Corrupt(f"{task.file.key} in the target is not the export of its offsets: {bad}", key=task.file.key) from bad
    if not is_sound:
        raise Corrupt(f"{task.file.key} in the target does not hold the records of the bucket", key=task.file.key)
    return _written(task.file, stored.metadata.num_rows, len(content), hashlib.sha256(content).hexdigest())


def _comparable(rows: pa.Table) -> pa.Table:
    """Return the rows with the bits of floating-point numbers as integers: Arrow compares numbers, and NaN equals none."""
    for number, column in enumerate(rows.schema):
        kind = _with_bits(column.type)
        if kind != column.type:
            bits = pa.chunked_array([chunk.view(kind) for chunk in rows.column(number).chunks], kind)
            rows = rows.set_column(number, column.with_type(kind), bits)
    return rows


def _with_bits(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(kind):
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_with_bits(part.type)) for part in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_bits(kind.key_type), kind.item_field.with_type(_with_bits(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_bits(kind.value_type)))
    return kind


def _equals(groups: Iterable[pa.Table], wanted: Iterable[pa.Table], file: PlannedFile) -> bool:
    """Whether the row groups of the file are the wanted ones. Raises ``ValueError`` if their numbers differ."""
    return all(found.equals(rows) for found, rows in zip(groups, wanted, strict=True))


def _holds(groups: Iterable[pa.Table], wanted: Iterable[pa.Table], file: PlannedFile) -> bool:
    """Whether the file has all wanted rows. Others, between them, were removed from the bucket since it was written."""
    left = iter(wanted)
    rows = next(left, None)
    before = file.first - 1
    for group in groups:
        held = group.column("offset").to_numpy()
        if not len(held):
            continue
        if held[0] <= before or held[-1] >= file.end or (np.diff(held) <= 0).any():
            return False
        before = held[-1]
        while rows is not None:
            offsets = rows.column("offset").to_numpy()
            count = int(np.searchsorted(offsets, before, side="right"))
            if not group.take(np.searchsorted(held, offsets[:count])).equals(rows.slice(0, count)):
                return False
            if count < len(offsets):
                rows = rows.slice(count)
                break
            rows = next(left, None)
    return rows is None


def _written(file: PlannedFile, records: int, size_bytes: int, sha256: str) -> WrittenFile:
    return WrittenFile(
        topic=file.topic, partition=file.partition, first=file.first, end=file.end, records=records, size_bytes=size_bytes,
        sha256=sha256, key=file.key,
    )  # fmt: skip


class _Upload:
    """A writable file that becomes one object, if its key is free. Aborted by an error in the ``with`` block."""

    def __init__(self, out: Bucket, key: str) -> None:
        self._out = out
        self._stream = StreamedUpload(out.store, key, part_bytes=PART_BYTES, parts_at_once=PARTS_AT_ONCE)
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0
        self.closed = False
        self.was_there = False

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._out.run(self._stream.abort())
            return
        try:
            self._out.run(self._stream.finish())
        except Conflict:
            self.was_there = True
            self._out.run(self._stream.abort())

    def write(self, data: bytes) -> int:
        content = bytes(data)
        self._sha256.update(content)
        self.size_bytes += len(content)
        self._out.run(self._stream.write([content]))
        return len(content)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        """Nothing to do: the object appears when it is whole."""

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
