"""Offsets as a user gives them: ``earliest``, ``latest``, a number, or ``time:TIME``."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from stratalog import kafka
from stratalog.parameters import moment_ms
from stratalog_core.errors import Invalid, NotFound
from stratalog_core.kafka_clients import translated
from stratalog_core.natural_numbers import natural_number

OFFSET_MAX: Final = 2**63 - 1
TARGETS = "earliest, latest, a number, or time:TIME such as time:2013-07-04."


def places(reader: Consumer, topic: str, partitions: list[int], target: str) -> list[TopicPartition]:
    """Return each partition's offset for ``target``. A number is clamped to the offsets that exist.

    Raises ``Invalid``, also for a number past the end of all partitions: it may be a date.
    """
    if target.startswith("time:"):
        found = kafka.offsets_at(reader, topic, partitions, moment_ms(target.removeprefix("time:")))
        return [_no_later_than_end(reader, place) for place in found]
    number = natural_number(target, OFFSET_MAX)
    if target not in ("earliest", "latest") and number is None:
        raise Invalid(f"{target!r} is not an offset: give {_remedy(target)}")
    ranges = {partition: bounds(reader, TopicPartition(topic, partition)) for partition in partitions}
    end = max(high for _, high in ranges.values())
    if number is not None and number > end:
        raise Invalid(f"offset {number} is past the end of {topic}, {end}: give latest for the end, or time:TIME for a time")
    found = []
    for partition, (low, high) in ranges.items():
        named = {"earliest": low, "latest": high}
        offset = min(max(number, low), high) if number is not None else named[target]
        found.append(TopicPartition(topic, partition, offset))
    return found


def _remedy(target: str) -> str:
    with suppress(Invalid):
        moment_ms(target)
        return f"time:{target}"
    return "earliest, latest, a number or time:TIME"


def _no_later_than_end(reader: Consumer, place: TopicPartition) -> TopicPartition:
    if place.offset >= 0:
        return place
    return TopicPartition(place.topic, place.partition, bounds(reader, place)[1])


def bounds(reader: Consumer, place: TopicPartition) -> tuple[int, int]:
    """Return the first and the end offset of a partition. Raises ``NotFound``."""
    with translated():
        found = reader.get_watermark_offsets(place, timeout=kafka.TIMEOUT_S)
    if found is None:
        raise NotFound(f"{place.topic}-{place.partition} has no offsets: see `stratalog topic describe {place.topic}`")
    return found
