"""``stratalog consume TOPIC``: prints records from an offset or time on, up to a count, to the end, or indefinitely."""

from __future__ import annotations

import json
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, Message, TopicPartition

from stratalog import kafka
from stratalog.command_group import examples
from stratalog.moments import format_moment
from stratalog.parameters import TIMES, Integer, moment_ms, partitions_option, valid_name
from stratalog.places import OFFSET_MAX, bounds
from stratalog.target import bootstrap_of, kafka_options
from stratalog_core.errors import Invalid
from stratalog_core.kafka_clients import as_ours, translated
from stratalog_core.message_headers import headers_of
from stratalog_core.natural_numbers import natural_number

_POLL_S = 0.5
_UNASSIGNED = -1
"""Stands for all partitions until the group has assigned some."""
_BATCH_MAX = 1000
_WITHOUT_HEADERS = "show it without headers, or begin after it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Show:
    keys: bool
    headers: bool
    timestamps: bool
    offsets: bool
    as_json: bool


@click.command(
    epilog=examples(
        "stratalog consume events --count 10 --keys --timestamps",
        "stratalog consume events --offset -5 --offsets",
        "stratalog consume events --time 15m --follow",
        "stratalog consume events --json | jq .value",
        "stratalog consume events --group readers --follow",
    )
)
@click.argument("topic", callback=valid_name)
@click.option(
    "--offset",
    metavar="OFFSET",
    default="earliest",
    show_default=True,
    help="earliest, latest, a number (with one --partition), or -N: the last N offsets of each partition.",
)
@click.option("--time", "moment", metavar="TIME", help=f"Start at a time: {TIMES}.")
@partitions_option("Read this partition; repeatable (default: all).")
@click.option("--count", type=Integer(1), help="Stop after this many records.")
@click.option("--follow", is_flag=True, help="Keep waiting for new records at the end (default: stop).")
@click.option(
    "--group", callback=valid_name, help="Read as a member of this consumer group, from its committed offsets, and commit."
)
@click.option("--committed-only/--uncommitted", default=True, help="Skip aborted transactions (default), or show them.")
@click.option("--keys", is_flag=True, help="Show keys.")
@click.option("--headers", is_flag=True, help="Show headers.")
@click.option("--timestamps", is_flag=True, help="Show timestamps.")
@click.option("--offsets", is_flag=True, help="Show partition and offset.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per record, with all fields.")
@kafka_options
@click.pass_context
def consume(
    context: click.Context,
    topic: str,
    offset: str,
    moment: str | None,
    partitions: tuple[int, ...],
    count: int | None,
    follow: bool,
    group: str | None,
    committed_only: bool,
    keys: bool,
    headers: bool,
    timestamps: bool,
    offsets: bool,
    as_json: bool,
    data: Path | None,
    bootstrap: str | None,
) -> None:
    """Print records of TOPIC, in order within each partition.

    With --group, the offsets after the printed records are committed, also if Ctrl-C or SIGTERM ends the command.
    """
    if moment and context.get_parameter_source("offset") is ParameterSource.COMMANDLINE:
        raise Invalid("--offset and --time cannot be combined: choose one")
    options: dict[str, str | int | bool] = {
        "group.id": group or "stratalog-cli",
        "enable.partition.eof": True,
        "auto.offset.reset": "latest" if offset == "latest" else "earliest",
        "isolation.level": "read_committed" if committed_only else "read_uncommitted",
    }
    brokers = kafka.admin(bootstrap_of(data, bootstrap))
    known = kafka.partitions_of(brokers.list_topics, topic)
    client = kafka.consumer(bootstrap_of(data, bootstrap), options)
    show = _Show(keys=keys, headers=headers, timestamps=timestamps, offsets=offsets, as_json=as_json)
    try:
        printed = _Printed(topic)
        pending = _begin(client, printed, group, Start(offset=offset, moment=moment, partitions=partitions), known)
        check = partial(kafka.check_reachable, brokers.list_topics)
        for message in _records(client, pending, check, count=count, follow=follow):
            _print(message, show)
            printed.add(message)
        if not printed.count and sys.stderr.isatty():
            click.echo("no records; --follow waits for new ones", err=True)
        if group:
            printed.commit(client)
    finally:
        client.close()


class _Printed:
    """The positions of a group's member behind the records that were printed. The client's own are behind those it has read."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.count = 0
        self._positions: dict[int, int] = {}

    def add(self, message: Message) -> None:
        self.count += 1
        self._positions[message.partition() or 0] = (message.offset() or 0) + 1

    def forget(self) -> None:
        """Forget the positions: the partitions are another member's by now, which has its own."""
        self._positions.clear()

    def commit(self, client: Consumer) -> None:
        """Commit the positions, and forget them."""
        places = [TopicPartition(self.topic, partition, offset) for partition, offset in self._positions.items()]
        self.forget()
        with translated():
            for place in client.commit(offsets=places, asynchronous=False) if places else ():
                if place.error is not None:
                    raise as_ours(place.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where to begin, as the options say."""

    offset: str
    moment: str | None
    partitions: tuple[int, ...]

    @property
    def last(self) -> int | None:
        """How many offsets before the end of each partition to begin; None: elsewhere."""
        return natural_number(self.offset[1:]) if self.offset.startswith("-") else None

    def place(self, topic: str, partition: int) -> TopicPartition:
        """Return the offset. Raises ``Invalid``."""
        names = {"earliest": OFFSET_BEGINNING, "latest": OFFSET_END}
        if self.offset in names:
            return TopicPartition(topic, partition, names[self.offset])
        number = natural_number(self.offset)
        if number is None:
            raise Invalid(f"--offset is {self.offset!r}: give earliest, latest, a number or -N; maximum is {OFFSET_MAX}")
        if len(self.partitions) != 1:
            raise Invalid(f"--offset {self.offset} needs exactly one --partition; given: {len(self.partitions)}")
        return TopicPartition(topic, partition, number)


def _begin(client: Consumer, printed: _Printed, group: str | None, start: Start, known: list[int]) -> set[int]:
    """Assign some of the ``known`` partitions, or subscribe to the topic.

    Returns the partitions whose end has not been reached, which change with a group's assignment.
    """
    topic = printed.topic
    if group:
        if start.partitions or start.moment or start.offset not in ("earliest", "latest"):
            raise Invalid(
                "--group reads the group's partitions from its committed offsets: leave out --partition, --time and a number as"
                " --offset"
            )
        pending = {_UNASSIGNED}

        def assigned(_: Consumer, places: list[TopicPartition]) -> None:
            pending.clear()
            pending.update(place.partition for place in places)
            others = len(known) - len(places)
            if others > 0:
                click.echo(f"other members of group {group} read {others} of {len(known)} partitions", err=True)

        # What was printed is committed before another member goes on there.
        client.subscribe(
            [topic],
            on_assign=assigned,
            on_revoke=lambda *_: printed.commit(client),
            on_lost=lambda *_: printed.forget(),
        )
        return pending
    wanted = kafka.selected(topic, known, start.partitions)
    if start.moment:
        client.assign(kafka.offsets_at(client, topic, wanted, moment_ms(start.moment)))
    elif start.last is not None:
        client.assign([_before_end(client, topic, partition, start.last) for partition in wanted])
    else:
        client.assign([_existing(client, start.place(topic, partition)) for partition in wanted])
    return set(wanted)


def _before_end(client: Consumer, topic: str, partition: int, count: int) -> TopicPartition:
    """Return the place that many offsets before the end of the partition, or its first offset."""
    low, high = bounds(client, TopicPartition(topic, partition))
    return TopicPartition(topic, partition, max(low, high - count))


def _existing(client: Consumer, place: TopicPartition) -> TopicPartition:
    """Return ``place``. Raises ``Invalid`` if it is past the end, where the client would begin with the oldest record."""
    if place.offset >= 0:
        end = bounds(client, place)[1]
        if place.offset > end:
            raise Invalid(f"--offset is {place.offset}; {place.topic}-{place.partition} ends at offset {end}")
    return place


def _records(
    client: Consumer, pending: set[int], check: Callable[[], None], *, count: int | None, follow: bool
) -> Iterator[Message]:
    """Yield up to ``count`` records. Unless ``follow``, stop when the end of every partition in ``pending`` is reached.

    If nothing is received for a time, ``check`` raises ``Unavailable`` if no broker answers; with ``follow`` it is not called.
    """
    left, silent_since = count if count is not None else sys.maxsize, time.monotonic()
    while left > 0 and (follow or pending):
        received = client.consume(min(left, _BATCH_MAX), timeout=_POLL_S)
        if received:
            silent_since = time.monotonic()
        elif not follow and time.monotonic() - silent_since > kafka.TIMEOUT_S:
            check()
            silent_since = time.monotonic()
        for message in received:
            failure = message.error()
            if failure is None:
                left -= 1
                yield message
            elif failure.code() == KafkaError._PARTITION_EOF:
                pending.discard(message.partition() or 0)
            elif failure.fatal() or not failure.retriable():
                raise as_ours(failure)


def _print(message: Message, show: _Show) -> None:
    document = _document(message, with_headers=show.headers or show.as_json)
    if show.as_json:
        click.echo(json.dumps(document))
        return
    fields = []
    if show.offsets:
        fields.append(f"{document['partition']}@{document['offset']}")
    if show.timestamps:
        fields.append(format_moment(document["timestamp_ms"]))
    if show.keys:
        fields.append(_plain(document["key"]))
    if show.headers:
        fields.append(",".join(f"{name}={_plain(value)}" for name, value in document["headers"]))
    click.echo("\t".join([*fields, _plain(document["value"])]))


def _document(message: Message, *, with_headers: bool) -> dict[str, Any]:
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp_ms": message.timestamp()[1],
        "key": _text(message.key()),
        "value": _text(message.value()),
        "headers": [[name, _text(value)] for name, value in headers_of(message, _WITHOUT_HEADERS)] if with_headers else [],
    }


def _text(content: Any) -> Any:
    """Return UTF-8 text as it is, and other bytes as ``{"base64": …}``."""
    if content is None or isinstance(content, str):
        return content
    try:
        return bytes(content).decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}


def _plain(content: Any) -> str:
    if content is None:
        return "null"
    return content if isinstance(content, str) else f"base64:{content['base64']}"
