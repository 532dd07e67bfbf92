"""Loads and reports as data, sent between processes as JSON lines."""

from __future__ import annotations

from typing import Literal

import msgspec

Options = dict[str, str | int | float | bool]
Buckets = list[tuple[int, int]]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """``random_ratio`` of each payload are random bytes, the rest zeros; ``file`` replaces both."""

    record_bytes: int = 1000
    random_ratio: float = 0.5
    pool: int = 1000
    file: str | None = None


class ProducerLoad(msgspec.Struct, frozen=True, kw_only=True, tag="producer"):
    """Records to ``topics`` in turn. ``records_per_s`` 0: at full speed; ``records`` 0: until the time is over.

    At full speed, or with ``whole_batches`` at a rate, batches of ``batch_records`` are sent, at most ``in_flight`` to each
    broker; ``producers_in_all`` are those of all processes. Otherwise records are sent when they are due, those within
    ``linger_ms`` together; with ``keys`` the client makes the batches. ``each_partition`` sends round robin to every
    ``partition_step``-th partition and reports the longest gap between acknowledgements of each; it restarts counting at
    MEASURE.
    """

    client: Options
    topics: list[str]
    partitions: int
    producers: int = 1
    producers_in_all: int = 1
    batch_records: int = 1
    in_flight: int = 5
    linger_ms: float = 0.0
    whole_batches: bool = False
    partition_step: int = 1
    payload: Payload = Payload()
    keys: Literal["none", "round-robin", "random"] = "none"
    records_per_s: float = 0.0
    records: int = 0
    warmup_s: float = 0.0
    duration_s: float = 10.0
    stamps: bool = False
    each_partition: bool = False
    seed: int = 1


class ConsumerLoad(msgspec.Struct, frozen=True, kw_only=True, tag="consumer"):
    """``consumers`` members of each of ``groups``; ends after ``duration_s`` at the latest, or at STOP.

    Counts from the first record, and again from MEASURE. At LEAVE, ``leavers`` members leave the first group. ``stamps``
    measures end to end: every payload must be stamped then. ``light`` members do not use librdkafka and speak ``protocol``;
    librdkafka takes it from ``client``. ``members`` is the number of a group's members in all processes. ``repeat`` seeks to
    the beginning at the end of each partition, so that readers never run out of history. With ``assigned``, the partitions of
    each member, members read from the beginning and join no group. Both work only with librdkafka.
    """

    client: Options
    topics: list[str]
    groups: list[str]
    consumers: int = 1
    duration_s: float = 3600.0
    stamps: bool = False
    light: bool = False
    protocol: str = "classic"
    members: int = 1
    leavers: int = 1
    repeat: bool = False
    assigned: list[list[int]] = []


class ConnectionLoad(msgspec.Struct, frozen=True, kw_only=True, tag="connections"):
    """``connections`` to the brokers in turn. Each sends ApiVersions once, then is idle until the end."""

    addresses: list[str]
    connections: int
    duration_s: float = 10.0


class CopierLoad(msgspec.Struct, frozen=True, kw_only=True, tag="copier"):
    """Copies records of ``source`` to ``target`` in transactions, each committed ``commit_ms`` after its first record.

    ``client`` is the producer's; ``group`` is also the transactional id. Ends at STOP. ``Counted.sent`` is the number of
    transactions.
    """

    client: Options
    consumer: Options
    source: str
    target: str
    group: str
    commit_ms: float = 100.0
    duration_s: float = 3600.0


Load = ProducerLoad | ConsumerLoad | ConnectionLoad | CopierLoad


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Longest time without an acknowledgement in one partition. ``first_at``: monotonic time of the first acknowledgement."""

    topic: str
    partition: int
    longest_s: float
    first_at: float


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """Counts of one process in its measured time, ``began_at`` to ``ended_at`` of the machine's monotonic clock, in seconds.

    ``latency`` is from the intended moment of sending to the acknowledgement (at a consumer, the receipt); ``behind`` is how
    late records reached the client; ``settled_s`` until the last partition was assigned, ``rebalance_s`` the same after a
    member left.
    """

    records: int
    record_bytes: int
    began_at: float
    ended_at: float
    sent: int = 0
    failed: int = 0
    failure: str = ""
    latency: Buckets = []
    latency_max_us: int = 0
    behind: Buckets = []
    behind_max_us: int = 0
    gaps: list[Gap] = []
    assigned: dict[str, int] = {}
    settled_s: float = 0.0
    rebalance_s: float = 0.0
    cpu_s: float = 0.0
    resident_bytes: int = 0
    per_group: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        return self.ended_at - self.began_at


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process is set up and waits for the start signal."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Records so far, warm-up included; assigned partitions; whether assignments changed after a member left.

    ``steady_partitions`` have acknowledged a record within a second after it was due.
    """

    records: int
    assigned: int = 0
    rebalanced: bool = False
    steady_partitions: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The process failed. ``wrong``: its settings are invalid, so a retry cannot succeed."""

    message: str
    wrong: bool = False


Report = Ready | Progress | Counted | Failed
