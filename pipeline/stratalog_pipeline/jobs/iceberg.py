"""Publishes the files of an export in an Apache Iceberg table, run by run, each run exactly once.

The files are those of ``export.py`` with topic and partition as columns; the table refers to them where they are, and nothing
is copied. A run with records becomes one snapshot. The number of the last such run is a property of the table, set by the
commit that adds the run's files, so a commit that is tried again after any outcome adds nothing twice, also if snapshots were
expired meanwhile. The snapshot's summary names the run and the manifest versions of its history. After each commit the table's
own counts, sizes and bounds of the new files are compared with the journal of the export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.io.pyarrow import _ConvertToIcebergWithoutIDs, visit_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from stratalog_core.errors import Conflict, Corrupt, Invalid, OutcomeUnknown, Unavailable
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.export_journal import Journal, Plan, WrittenFile
from stratalog_pipeline.value_formats.values import CORRUPT_RECORD

RUN: Final = "stratalog.export-run"
"""Table property and entry of a snapshot's summary: the number of the last run, and that of the snapshot's."""
RECORDS: Final = "stratalog.export-records"
"""Table property: the records of all published runs."""
TARGET: Final = "stratalog.export-target"
JOURNAL: Final = "stratalog.export-journal"
"""Table property: the identity of the journal whose runs are published."""
MANIFESTS: Final = "stratalog.manifest-versions"
ATTEMPTS: Final = 5
_OFFSET_ID: Final = 5
_HEADER: Final = StructType(NestedField(10, "key", StringType()), NestedField(11, "value", BinaryType()))
_FIELDS: Final = (
    NestedField(1, "key", BinaryType()),
    NestedField(2, "value", BinaryType()),
    NestedField(3, "topic", StringType()),
    NestedField(4, "partition", IntegerType()),
    NestedField(_OFFSET_ID, "offset", LongType()),
    NestedField(6, "timestamp", TimestamptzType()),
    NestedField(7, "timestampType", IntegerType()),
)
_HEADERS: Final = NestedField(8, "headers", ListType(element_id=9, element_type=_HEADER, element_required=False))
_SPEC: Final = PartitionSpec(
    PartitionField(source_id=3, field_id=1000, transform=IdentityTransform(), name="topic"),
    PartitionField(source_id=4, field_id=1001, transform=IdentityTransform(), name="partition"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergTarget:
    """A table, as ``namespace.table``, and the catalog that knows it: its name and properties, as pyiceberg names them."""

    table: str
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The runs that were published now. ``table_records`` are all of the table, ``exported_records`` those of its runs.

    They differ if others have written to the table.
    """

    table: str
    runs: tuple[int, ...]
    files: int
    records: int
    snapshot_id: int | None
    table_records: int
    exported_records: int


def check_iceberg_url(url: str) -> None:
    """Raise ``Invalid`` unless tables of Iceberg can be below the export at ``url``."""
    scheme = urlsplit(url).scheme
    if scheme not in ("", "file", "s3"):
        raise Invalid(
            f"Iceberg tables are published in directories and S3, not in {scheme}:// stores: export there without Iceberg"
        )


def publish(url: str, target: IcebergTarget, *, verify: bool = False) -> Published:
    """Publish the runs of the export at ``url`` that the table lacks; creates the table, and its namespace, if need be.

    The first run decides the table's columns, so before it no table is created.
    ``verify``: read each file of these runs again and compare its digest with the journal's. Raises ``Invalid`` for a catalog
    that cannot be opened or a table of another export, ``Conflict`` if others keep changing the table, ``Corrupt`` if the table
    or a file is not what was exported, ``Unavailable``, and ``OutcomeUnknown``: publish again then, nothing is added twice.
    """
    check_iceberg_url(url)
    with Bucket(url) as out:
        journal = Journal(out)
        first = journal.first_plan()
        if first is not None and not first.has_place:
            raise Invalid(f"the export at {url} has no columns topic and partition; export to another target for Iceberg")
        with _errors(target), load_catalog(target.catalog, **{**_file_properties(url), **target.properties}) as catalog:
            table = _table(catalog, target.table, _location(url), first)
            if table is None:
                return _nothing(target)
            _check_target(table, url)
            _check_journal(table, journal)
            published: dict[int, list[WrittenFile]] = {}
            for run in journal.finished_runs():
                if run > _number(table, RUN):
                    files = [file for file in journal.written(run) if file.records]
                    if verify:
                        _check_digests(out, files)
                    # Only a commit of files requires the snapshot that was loaded, so an empty run leaves no trace.
                    if files and _commit(table, url, run, files, journal):
                        published[run] = files
            return _published(table, target, published)


def _nothing(target: IcebergTarget) -> Published:
    return Published(
        table=target.table, runs=(), files=0, records=0, snapshot_id=None, table_records=0, exported_records=0
    )  # fmt: skip


def _published(table: Table, target: IcebergTarget, runs: Mapping[int, Sequence[WrittenFile]]) -> Published:
    snapshot = table.current_snapshot()
    total = snapshot.summary.get("total-records") if snapshot is not None and snapshot.summary is not None else None
    return Published(
        table=target.table,
        runs=tuple(runs),
        files=sum(map(len, runs.values())),
        records=sum(file.records for files in runs.values() for file in files),
        snapshot_id=snapshot.snapshot_id if snapshot is not None else None,
        table_records=int(total or 0),
        exported_records=_number(table, RECORDS),
    )


def _table(catalog: Catalog, name: str, location: str, first: Plan | None) -> Table | None:
    """Return the table, created if the catalog does not have it, for the columns of the export's ``first`` run.

    None if there is no such run yet. Raises ``Invalid`` for a name without a namespace.
    """
    if not name.rpartition(".")[0]:
        raise Invalid(f"table {name!r} has no namespace: give it as NAMESPACE.TABLE")
    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        if first is None:
            return None
    with suppress(NamespaceAlreadyExistsError):
        catalog.create_namespace(name.rpartition(".")[0])
    fields = _fields(first)
    properties = {TARGET: location, RUN: "0", RECORDS: "0", TableProperties.COMMIT_NUM_RETRIES: "0"}
    try:
        return catalog.create_table(name, Schema(*fields), location, _SPEC, properties=properties)
    except TableAlreadyExistsError:
        return catalog.load_table(name)


def _fields(first: Plan) -> list[NestedField]:
    """The columns of files as the first run decided. A new table numbers the fields within columns after the columns."""
    fields = [*_FIELDS, _HEADERS] if first.include_headers else [*_FIELDS]
    if first.values is not None:
        stored = pa.schema([("value", first.values.kind())])
        try:
            converted: Any = visit_pyarrow(stored, _ConvertToIcebergWithoutIDs())
        except TypeError as unknown:
            raise Invalid(f"Iceberg has no type for the schema of values: {unknown}") from unknown
        fields[1] = NestedField(2, "value", converted.fields[0].field_type)
        if first.values.is_permissive:
            fields.append(NestedField(9, CORRUPT_RECORD, BinaryType()))
    return fields


def _check_target(table: Table, url: str) -> None:
    owner = table.properties.get(TARGET)
    if owner != _location(url):
        raise Invalid(
            f"the table {f'belongs to the export at {owner}' if owner else 'was not created by an export'}; name another table"
        )


def _check_journal(table: Table, journal: Journal) -> None:
    """Raise ``Invalid`` if the table has runs of a journal that was in the target before: their numbers mean other files."""
    run, known = _number(table, RUN), table.properties.get(JOURNAL)
    if run and (run > journal.last_run or known not in (None, journal.identity())):
        raise Invalid(
            f"the table has {run} runs of an export that is not in the target any more, which was begun again since: drop the "
            "table, or name another"
        )


def _commit(table: Table, url: str, run: int, files: Sequence[WrittenFile], journal: Journal) -> bool:
    """Add a run's files. False if another process has published the run."""
    paths = {f"{_location(url)}/{file.key}": file for file in files}
    versions, identity = journal.plan(run).manifest_versions, journal.identity()
    for _ in range(ATTEMPTS):
        if run <= _number(table, RUN):
            return False
        _disable_client_retries(table)
        records = _number(table, RECORDS) + sum(file.records for file in files)
        summary = {RUN: str(run), MANIFESTS: json.dumps(versions, separators=(",", ":"))}
        try:
            # One commit, which requires the snapshot and the metadata that were loaded.
            with table.transaction() as change:
                change.set_properties({RUN: str(run), RECORDS: str(records), JOURNAL: identity})
                change.add_files(list(paths), snapshot_properties=summary)
        except (CommitFailedException, ValidationException):
            table.refresh()
            continue
        except (OSError, RESTError) as lost:
            raise OutcomeUnknown(f"run {run} may be in the table or not: {lost}; run the export again") from lost
        _reconcile(table, paths)
        return True
    raise Conflict(f"others changed the table during each of {ATTEMPTS} attempts to add run {run}; run the export again")


def _disable_client_retries(table: Table) -> None:
    """Make the client try each commit once: a retry reloads the table and would add the files even if the run is in it."""
    if table.properties.get(TableProperties.COMMIT_NUM_RETRIES) != "0":
        with table.transaction() as change:
            change.set_properties({TableProperties.COMMIT_NUM_RETRIES: "0"})


def _reconcile(table: Table, paths: Mapping[str, WrittenFile]) -> None:
    """Raise ``Corrupt`` unless the newest snapshot added exactly these files, with these records, sizes and offsets."""
    added = dict(_added(table))
    for path in sorted(added.keys() | paths.keys()):
        found, wanted = added.get(path), paths.get(path)
        if found is None or wanted is None:
            raise Corrupt(f"{path} is {'not in the snapshot' if found is None else 'in the snapshot and not in the run'}")
        first, last = _bounds(found)
        if (found.record_count, found.file_size_in_bytes) != (wanted.records, wanted.size_bytes):
            raise Corrupt(
                f"{path}: the table counts {found.record_count} records and {found.file_size_in_bytes} bytes, the export wrote "
                f"{wanted.records} and {wanted.size_bytes}"
            )
        if not wanted.first <= first <= last < wanted.end:
            raise Corrupt(f"{path} has offsets {first}..{last}, the export wrote {wanted.first}..{wanted.end}")


def _added(table: Table) -> Iterator[tuple[str, DataFile]]:
    snapshot = table.current_snapshot()
    assert snapshot is not None, "a run was committed"
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id == snapshot.snapshot_id:
            for entry in manifest.fetch_manifest_entry(table.io):
                if entry.snapshot_id == snapshot.snapshot_id:
                    yield entry.data_file.file_path, entry.data_file


def _bounds(file: DataFile) -> tuple[int, int]:
    lowest, highest = (from_bytes(LongType(), found[_OFFSET_ID]) for found in (file.lower_bounds, file.upper_bounds))
    return int(lowest), int(highest)


def _check_digests(out: Bucket, files: Sequence[WrittenFile]) -> None:
    for file in files:
        if hashlib.sha256(out.run(out.store.get(file.key))).hexdigest() != file.sha256:
            raise Corrupt(f"{file.key} in the target is not the file that was exported: its SHA-256 differs", key=file.key)


def _number(table: Table, name: str) -> int:
    return int(table.properties.get(name, "0"))


def _location(url: str) -> str:
    """The target as Iceberg addresses it: no options, no slash at the end."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return f"s3://{parts.netloc}{parts.path}".rstrip("/")
    return f"file://{parts.path}".rstrip("/")


def _file_properties(url: str) -> dict[str, str]:
    """The options of an S3 URL as pyiceberg's properties."""
    given = dict(parse_qsl(urlsplit(url).query))
    return {f"s3.{name}": given[name] for name in ("endpoint", "region") if name in given}


@contextmanager
def _errors(target: IcebergTarget) -> Iterator[None]:
    """Turn errors of the catalog into ours."""
    try:
        yield
    except RESTError as refused:
        raise Unavailable(f"catalog {target.catalog!r}: {refused}") from refused
    except (ValueError, NotImplementedError) as wrong:
        raise Invalid(f"catalog {target.catalog!r}, table {target.table!r}: {wrong}") from wrong
    except Exception as failed:
        if _origin(failed) not in ("sqlalchemy", "requests", "pyiceberg") and not isinstance(failed, OSError):
            raise
        raise Unavailable(f"catalog {target.catalog!r}: {str(failed).splitlines()[0]}") from failed


def _origin(failed: Any) -> str:
    return type(failed).__module__.partition(".")[0]
