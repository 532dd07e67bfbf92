"""Sources of a backfill that Spark itself reads only with extra JARs: Avro files, and a topic of another Kafka cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.arrow.schema import arrow_schema
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.options import ReadOptions, Subscribed, parse_options
from stratalog_pipeline.planning import BrokerSplit, PartitionName
from stratalog_pipeline.task_process import begin_task

INSTALL_AVRO: Final = "Avro needs fastavro: pip install 'stratalog[avro]'"
_COPIED: Final = ("key", "value", "headers", "timestamp", "partition")


def avro_rows(spark: SparkSession, paths: Sequence[str], schema: str | None = None) -> DataFrame:
    """Return the records of Avro files; ``schema`` is the JSON of the one to read them by, by default that of the first file.

    Raises ``Invalid`` for a schema or a file that cannot be read, and ``NotFound``. Tasks raise both, and ``Corrupt``.
    """
    try:
        from stratalog_pipeline.value_formats import avro, avro_files
    except ModuleNotFoundError as missing:
        if missing.name != "fastavro":
            raise
        raise Invalid(INSTALL_AVRO) from None
    tasks = avro_files.find_splits(paths)
    reader = avro.parse_schema(schema) if schema is not None else avro_files.read_schema(tasks[0][0].path)
    kind = avro.arrow_type(reader)
    if not pa.types.is_struct(kind):
        raise Invalid(f"the schema describes {kind}, not records with fields")

    def read(number: int) -> Iterator[pa.RecordBatch]:
        return avro_files.read_splits(tasks[number], reader, must_be_same=schema is None)

    return _frame(spark, len(tasks), pa.schema(list(kind)), read)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSource:
    """A topic of the cluster at ``bootstrap``. ``client`` configures the client, by librdkafka's names."""

    bootstrap: str
    topic: str
    client: Mapping[str, str] = field(default_factory=dict, repr=False)

    def options(self) -> ReadOptions:
        """Return the options of a read of committed records. Raises ``Invalid``."""
        client = {f"kafka.{name}": value for name, value in self.client.items()}
        return parse_options({**client, "kafka.bootstrap.servers": self.bootstrap, "subscribe": self.topic})


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaRange:
    """The committed records that the brokers had when it was asked for: offsets of every partition."""

    options: ReadOptions
    splits: tuple[BrokerSplit, ...]


def kafka_range(source: KafkaSource) -> KafkaRange:
    """Fix what is copied. Raises ``NotFound`` if there is no such topic, ``Invalid``, ``Unavailable``."""
    options = source.options()
    brokers = Brokers(options)
    found = brokers.topics(Subscribed(topics=(source.topic,)))
    if not found:
        raise NotFound(f"there is no topic {source.topic!r} at {source.bootstrap}")
    names = [
        PartitionName(topic=source.topic, topic_id=found[0].topic_id, partition=number)
        for number in range(found[0].partition_count)
    ]
    limits = brokers.limits(names)
    return KafkaRange(options=options, splits=tuple(BrokerSplit(name=name, offsets=limits[name]) for name in names))


def kafka_rows(spark: SparkSession, found: KafkaRange, *, keeps_offsets: bool) -> DataFrame:
    """Return the records of ``found``, each partition by one task, in the order of offsets.

    A retried task reads the same records, or raises ``NotFound`` if they have been deleted.
    """

    def read(number: int) -> Iterator[pa.RecordBatch]:
        from stratalog_pipeline.arrow.messages import to_arrow

        split = found.splits[number]
        if split.offsets.first == split.offsets.end:
            return iter(())
        messages = Brokers(found.options).read(split)
        return to_arrow(_without_gaps(messages, split) if keeps_offsets else messages, _COPIED)

    return _frame(spark, len(found.splits), arrow_schema(_COPIED), read)


def _without_gaps(runs: Iterator[Sequence[Any]], split: BrokerSplit) -> Iterator[Sequence[Any]]:
    """Yield ``runs``. Raises ``Invalid`` at an offset without a record."""
    expected = split.offsets.first
    for run in runs:
        for message in run:
            if message.offset() != expected:
                raise _gap(split, expected, message.offset())
            expected += 1
        yield run
    if expected != split.offsets.end:
        raise _gap(split, expected, split.offsets.end)


def _gap(split: BrokerSplit, first: int, end: int) -> Invalid:
    return Invalid(
        f"{split.name} has no records at offsets {first}..{end - 1}, as after compaction or a transaction, so offsets cannot"
        " be kept: leave out --keep-offsets"
    )


def _frame(spark: SparkSession, tasks: int, schema: pa.Schema, read: Callable[[int], Iterator[pa.RecordBatch]]) -> DataFrame:
    """Return a frame of ``tasks`` tasks, each with the batches that ``read`` yields for its number.

    A data source of this session: ``mapInArrow`` needs pandas.
    """
    source_name = f"stratalog-backfill-{uuid.uuid4().hex}"

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(tasks)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            begin_task()
            return read(partition.value)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return source_name

        def schema(self) -> StructType:
            return from_arrow_schema(schema, prefer_timestamp_ntz=True)

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

    spark.dataSource.register(Source)
    return spark.read.format(source_name).load()
