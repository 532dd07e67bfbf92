"""``stratalog produce TOPIC``: one record per line of standard input, or one given by ``--value``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from confluent_kafka import KafkaError, Message, Producer

from stratalog import kafka
from stratalog.command_group import examples
from stratalog.output import json_option, print_done, progress_bar
from stratalog.parameters import PARTITION, TIMES, argument_bytes, is_text, moment_ms, valid_name, valid_partition
from stratalog.target import bootstrap_of, kafka_options
from stratalog_core.errors import Invalid, Unavailable
from stratalog_core.kafka_clients import as_ours, translated

_FLUSH_TIMEOUT_S = 120.0
_FLUSH_S = 0.5
_SILENT_S = 10.0
_FIND_CAUSE = "`stratalog doctor` names the cause, such as a full disk"
_BY_HASH = -1
_NOW = 0
"""As a timestamp, to the client library."""
_RECORD_BYTES_MAX = 100_000_000
"""Of the client library, which by default refuses what is above 1 MB. The topic's max.message.bytes decides."""
_Record = tuple[bytes | None, bytes | None]
_Headers = list[tuple[str, str | bytes | None]]


class _MalformedLine(Invalid):
    """A line of standard input cannot be split into key and value."""


@click.command(
    epilog=examples(
        "seq 1 1000 | stratalog produce events",
        r"stratalog produce events --key-separator '\t' < pairs.tsv",
        "stratalog produce events --key user-1 --value hello --header source=shell",
        "stratalog produce events --key user-1 --null",
    )
)
@click.argument("topic", callback=valid_name)
@click.option("--value", help="Send this one record (default: one record per line of standard input).")
@click.option("--null", "tombstone", is_flag=True, help="Send one record without a value (needs --key).")
@click.option("--key", help="Key of every record.")
@click.option("--key-separator", metavar="TEXT", help="Split each line at TEXT into key and value; \\t is a tab.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header of every record; repeatable.")
@click.option("--partition", type=PARTITION, callback=valid_partition, help="Partition (default: by the key's hash).")
@click.option("--timestamp", metavar="TIME", help=f"Timestamp of every record: {TIMES} (default: now).")
@click.option(
    "--compression",
    default="none",
    show_default=True,
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    help="Compression of the record batches.",
)
@click.option(
    "--acks",
    default="all",
    show_default=True,
    type=click.Choice(["0", "1", "all"]),
    help="Acknowledgement to wait for, as of Kafka's setting. With 0 and 1, a failure may lose or repeat records.",
)
@kafka_options
@json_option
def produce(
    topic: str,
    value: str | None,
    tombstone: bool,
    key: str | None,
    key_separator: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    timestamp: str | None,
    compression: str,
    acks: str,
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """Write records to TOPIC. Returns when all are acknowledged; fails with the first error."""
    if key_separator and (key is not None or value is not None):
        raise Invalid("--key-separator splits lines of standard input: leave out --key and --value, or --key-separator")
    options: dict[str, str | int] = {
        "compression.type": compression, "acks": acks, "linger.ms": 5, "message.max.bytes": _RECORD_BYTES_MAX,
    }  # fmt: skip
    if acks != "all":
        options["enable.idempotence"] = "false"
    records = _records(value, tombstone, key, key_separator)
    place = _BY_HASH if partition is None else partition
    timestamp_ms, found_headers = _timestamp_ms(timestamp), _headers(headers)
    client = kafka.producer(bootstrap_of(data, bootstrap), options)
    _check_topic(client, topic, partition)
    count = _Sender(client, topic, place, found_headers, timestamp_ms).send_all(records)
    print_done({"topic": topic, "records": count}, f"{_counted(count)} acknowledged", as_json=as_json)


def _check_topic(client: Producer, topic: str, partition: int | None) -> None:
    """Say that a topic is new, which may be a typing error. Raises ``NotFound`` for a partition that it does not have."""
    found = kafka.listed(client.list_topics).topics.get(topic)
    if found is None:
        click.echo(f"topic {topic!r} does not exist: a broker creates it, unless its auto_create_topics is off", err=True)
    elif partition is not None:
        kafka.selected(topic, sorted(found.partitions), [partition])


def _timestamp_ms(timestamp: str | None) -> int:
    """Return a timestamp for the client library. Raises ``Invalid``."""
    if timestamp is None:
        return _NOW
    time_ms = moment_ms(timestamp)
    if time_ms <= 0:
        raise Invalid(f"--timestamp is {timestamp}; minimum is 1970-01-01T00:00:00.001Z")
    return time_ms


def _counted(records: int) -> str:
    return "1 record" if records == 1 else f"{records} records"


class _Sender:
    def __init__(self, client: Producer, topic: str, partition: int, headers: _Headers, timestamp_ms: int) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._headers = headers
        self._timestamp_ms = timestamp_ms
        self._acknowledged = 0
        self._acknowledged_at: float | None = time.monotonic()
        """None: the user knows that nothing is acknowledged."""
        self._failure: KafkaError | None = None

    def send_all(self, records: Iterable[_Record]) -> int:
        """Send all records and return how many were acknowledged. Raises the first failure, and ``Unavailable``."""
        try:
            with progress_bar() as progress:
                task = progress.add_task("producing", total=None)
                for count, (key, value) in enumerate(records, 1):
                    self._send(key, value)
                    if count % 1000 == 0:
                        progress.update(task, completed=self._acknowledged)
        except _MalformedLine as wrong:
            wrong.message += f"; acknowledged before it: {_counted(self._all_acknowledged())}"
            raise
        return self._all_acknowledged()

    def _all_acknowledged(self) -> int:
        """Wait for the acknowledgements of what was sent, and return their number. Raises as ``send_all``."""
        waiting = self._flush()
        self._raise_failure()
        if waiting:
            late = f"{waiting} records were not acknowledged within {_FLUSH_TIMEOUT_S:.0f} s"
            raise Unavailable(f"{late}, and may be written or not: {_FIND_CAUSE}")
        return self._acknowledged

    def _flush(self) -> int:
        """Return how many records are not acknowledged after a time. A signal ends the wait between two calls of the client."""
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while (waiting := self._client.flush(_FLUSH_S)) and time.monotonic() < deadline:
            self._raise_failure()
            self._note_silence()
        return waiting

    def _note_silence(self) -> None:
        """Say once that nothing has been acknowledged for a time: the client library retries in silence."""
        if self._acknowledged_at is not None and time.monotonic() - self._acknowledged_at > _SILENT_S:
            self._acknowledged_at = None
            click.echo(f"no record acknowledged for {_SILENT_S:.0f} s, still trying: {_FIND_CAUSE}", err=True)

    def _send(self, key: bytes | None, value: bytes | None) -> None:
        while True:
            self._raise_failure()
            try:
                with translated():
                    self._client.produce(
                        self._topic,
                        value=value,
                        key=key,
                        partition=self._partition,
                        timestamp=self._timestamp_ms,
                        headers=self._headers,
                        on_delivery=self._delivered,
                    )
                self._client.poll(0)
                return
            except BufferError:
                self._client.poll(0.5)
                self._note_silence()

    def _delivered(self, failure: KafkaError | None, message: Message) -> None:
        self._acknowledged += failure is None
        if self._acknowledged_at is not None:
            self._acknowledged_at = time.monotonic()
        self._failure = self._failure or failure

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        if self._failure.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            limit = f"`stratalog topic config {self._topic}` shows max.message.bytes"
            raise Invalid(f"a batch of records is too large for topic {self._topic!r}: {limit}; --set raises it")
        raise as_ours(self._failure)


def _records(value: str | None, tombstone: bool, key: str | None, key_separator: str | None) -> Iterator[_Record]:
    key_bytes = argument_bytes(key) if key is not None else None
    if tombstone and (key is None or value is not None):
        raise Invalid("--null needs --key and cannot be combined with --value")
    if tombstone or value is not None:
        yield key_bytes, argument_bytes(value) if value is not None else None
        return
    if sys.stdin.isatty():
        click.echo("one record per line; Ctrl-D ends", err=True)
    separator = argument_bytes(key_separator.replace("\\t", "\t")) if key_separator else None
    for number, line in enumerate(sys.stdin.buffer, 1):
        content = line.rstrip(b"\r\n")
        yield _split(number, content, separator) if separator else (key_bytes, content)


def _split(number: int, line: bytes, separator: bytes) -> _Record:
    key, found, value = line.partition(separator)
    if not found:
        shown, wanted = (each.decode(errors="backslashreplace") for each in (line[:60], separator))
        raise _MalformedLine(f"line {number}, {shown!r}, has no separator {wanted!r}: correct the line or --key-separator")
    return key, value


def _headers(texts: tuple[str, ...]) -> _Headers:
    for text in texts:
        if "=" not in text:
            raise Invalid(f"header {text!r} is not NAME=VALUE")
        if not is_text(text.partition("=")[0]):
            raise Invalid(f"the name of header {text!r} is not valid UTF-8")
    return [(name, argument_bytes(value)) for name, value in (text.split("=", 1) for text in texts)]
