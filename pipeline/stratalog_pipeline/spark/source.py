"""``spark.read.format("stratalog")``: the cold history of topics as a table, read directly from the bucket.

Schema and options are those of Spark's Kafka source. A user's schema selects columns. Options are checked when the data frame
is created; the bucket is first accessed when the query is planned. ``spark.readStream`` takes the same options and has the same
rows. A write sends rows to brokers, or makes a new topic in the bucket if it has the option ``store``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.schema import ARROW_TYPES, COLUMNS, COLUMNS_WITH_HEADERS, SPARK_DDL, check_columns
from stratalog_pipeline.brokers import with_store
from stratalog_pipeline.metadata_tables import TABLES
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_pipeline.spark.metadata_reader import MetadataReader
from stratalog_pipeline.spark.reader import PushdownReader, StratalogReader
from stratalog_pipeline.value_formats.values import CORRUPT_RECORD, Values, resolve

if TYPE_CHECKING:
    from stratalog_pipeline.kafka_sink import WriteOptions

NAME: Final = "stratalog"
_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class StratalogDataSource(DataSource):
    """The ``stratalog`` format; Spark creates one with the options of one read."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str | StructType:
        options = parse_options(self._given, "either")
        if options.values is not None:
            return self._schema_with_values(options, resolve(options))
        types = SPARK_DDL if options.table == "records" else _table_types(options)
        everything = COLUMNS if options.table == "records" and not options.include_headers else tuple(types)
        columns = check_columns([(name, types.get(name, "unknown")) for name in options.columns], types) or everything
        return ", ".join(f"{name} {types[name]}" for name in columns)

    def _schema_with_values(self, options: ReadOptions, values: Values) -> StructType:
        types = _types_with_values(values)
        stored = COLUMNS_WITH_HEADERS if options.include_headers else COLUMNS
        everything = (*stored, CORRUPT_RECORD) if values.is_permissive else stored
        wanted = [(name, types.get(name, "unknown")) for name in options.columns]
        arrow = {**ARROW_TYPES, "value": values.kind(), CORRUPT_RECORD: pa.binary()}
        return _spark_schema(pa.schema([(name, arrow[name]) for name in check_columns(wanted, types) or everything]))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self._given, "batch")
        fields = _selected(schema, options)
        options = with_store(options)
        if options.table != "records":
            return MetadataReader(options, check_columns(fields, _table_types(options)))
        values, columns = _values_and_columns(options, fields)
        return (PushdownReader if _pushdown_is_on() else StratalogReader)(options, columns, values)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from stratalog_pipeline.spark.stream_reader import StratalogStreamReader

        options = parse_options(self._given, "stream")
        fields = _selected(schema, options)
        options = with_store(options)
        values, columns = _values_and_columns(options, fields)
        return StratalogStreamReader(options, columns, values)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if "store" in {name.lower() for name in self._given}:
            return self._bulk_writer(schema, overwrite)
        from stratalog_pipeline.spark.writer import KafkaWriter

        return KafkaWriter(self._checked(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        from stratalog_pipeline.spark.writer import KafkaStreamWriter

        return KafkaStreamWriter(self._checked(schema, overwrite, is_stream=True))

    def _bulk_writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from stratalog_pipeline.bulk_sink import parse_bulk_options
        from stratalog_pipeline.kafka_sink import check_written_columns
        from stratalog_pipeline.spark.bulk_writer import BulkWriter

        if overwrite:
            raise Invalid("a bulk write makes a new topic and replaces none: write with .mode('append')")
        options = parse_bulk_options(self._given)
        names = check_written_columns(_fields(schema), options.topic)
        if "topic" in names:
            raise Invalid("a bulk write makes one topic, that of option 'topic': drop column 'topic'")
        if "partition" not in names:
            raise Invalid("there is no column 'partition'; use `stratalog_pipeline.jobs.backfill.backfill`, which adds it")
        return BulkWriter(options)

    def _checked(self, schema: StructType, overwrite: bool, *, is_stream: bool = False) -> WriteOptions:
        from stratalog_pipeline.kafka_sink import check_topic, check_written_columns, parse_write_options

        if overwrite:
            raise Invalid("a topic can only be appended to: write with .mode('append'), or a stream with outputMode('append')")
        options = parse_write_options(self._given, is_stream=is_stream)
        check_written_columns(_fields(schema), options.topic)
        check_topic(options)
        return options


def _values_and_columns(options: ReadOptions, fields: Sequence[tuple[str, str]]) -> tuple[Values | None, tuple[str, ...]]:
    """Return how values are decoded, and the columns that a schema of ``(name, Spark type)`` names."""
    if options.values is None:
        return None, check_columns(fields)
    values = resolve(options)
    return values, check_columns(fields, _types_with_values(values))


def _types_with_values(values: Values) -> dict[str, str]:
    """Return the Spark type of each column; for that of the value, the one that Spark gives to its Arrow type."""
    (value,) = _spark_schema(pa.schema([("value", values.kind())])).fields
    corrupt = {CORRUPT_RECORD: "binary"} if values.is_permissive else {}
    return {**SPARK_DDL, "value": value.dataType.simpleString(), **corrupt}


def _spark_schema(schema: pa.Schema) -> StructType:
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def _table_types(options: ReadOptions) -> dict[str, str]:
    return {name: spark_type for name, (_, spark_type) in TABLES[options.table].columns.items()}


def _fields(schema: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


def _selected(schema: StructType, options: ReadOptions) -> list[tuple[str, str]]:
    """Return the columns of a user's schema, or of the option ``columns``."""
    fields = _fields(schema)
    if not fields:
        raise Invalid("schema: it has no column; name at least one")
    if options.columns and options.columns != tuple(name for name, _ in fields):
        raise Invalid("option 'columns' contradicts the schema: give one of them")
    return fields


def _pushdown_is_on() -> bool:
    """Return whether this is Spark's pushdown worker, started only if ``spark.sql.python.filterPushdown.enabled`` is set.

    The planner's processes have no session to ask, and Spark does not pass the setting to a source.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    # The worker's module is the daemon's argument; without the daemon it is the main module itself.
    return _PUSHDOWN_WORKER in sys.argv or getattr(main, "name", "") == _PUSHDOWN_WORKER
