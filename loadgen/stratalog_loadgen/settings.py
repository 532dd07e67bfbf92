"""The settings of a measurement, as data; every result repeats it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stratalog_core.errors import Invalid
from stratalog_loadgen.processes.loads import Options, Payload

_QUEUE_KIB, _QUEUE_KIB_MIN = 65_536, 4_096
_QUEUE_RECORDS = 500_000
_QUEUE_FULL_MS = 50
_BATCH_RECORDS_MAX = 1_000_000
_REQUEST_BYTES_MIN = 1_000_000
_RECORD_OVERHEAD_BYTES = 1024
_BATCH_BYTES_MAX = 1_000_000_000
# Record batches of format 2: the header, and the approximate overhead of a record.
_BATCH_HEAD_BYTES, _RECORD_HEAD_BYTES = 61, 12
# Maximum requests in flight per broker of an idempotent producer; a few times that is enough without idempotence.
_IN_FLIGHT_IDEMPOTENT, _IN_FLIGHT = 5, 20
_BROKERS = 4
_LINGER_MS = 60_000
# The time in which a few records are passed to the client: with less, it sends the first of them alone.
_HAND_OVER_MS = 0.5
_RECORDS_PER_S_ALONE = 4_000


class Topics(msgspec.Struct, frozen=True, kw_only=True):
    """New topics, which are deleted after the measurement, or (``name``) an existing one, which is kept.

    ``replication_factor`` -1 is the cluster's default. ``keep`` leaves new topics in place.
    """

    name: str | None = None
    count: int = 1
    partitions: int = 6
    replication_factor: int = -1
    configs: dict[str, str] = {}
    keep: bool = False


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Records to send, and how. ``batch_records`` 1 is one record per batch; 0 leaves the bound to ``batch_bytes``.

    ``producers`` clients are spread over ``processes``; ``client`` are further settings of librdkafka.
    """

    payload: Payload = Payload()
    batch_bytes: int = 131_072
    batch_records: int = 0
    linger_ms: float = 5.0
    compression: str = "none"
    acks: Literal["0", "1", "all"] = "all"
    producers: int = 1
    processes: int = 1
    keys: Literal["none", "round-robin", "random"] = "none"
    client: Options = {}


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A warm-up, which does not count, then the measured time."""

    warmup_s: float = 5.0
    duration_s: float = 30.0

    @property
    def whole_s(self) -> float:
        return self.warmup_s + self.duration_s


class Readers(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` times ``consumers`` members, spread over ``processes`` (0: one per group).

    ``light`` members are not librdkafka's, whose threads are too many for a machine with hundreds of them. ``protocol`` is that
    of their groups: classic or consumer.
    """

    groups: int = 1
    consumers: int = 1
    processes: int = 0
    light: bool = False
    protocol: str = "classic"
    client: Options = {}


def batch_records(traffic: Traffic) -> int:
    """Records that fill one batch of ``batch_bytes``."""
    if traffic.batch_records:
        return traffic.batch_records
    room = traffic.batch_bytes - _BATCH_HEAD_BYTES
    return max(1, min(_BATCH_RECORDS_MAX, room // (traffic.payload.record_bytes + _RECORD_HEAD_BYTES)))


def in_flight(traffic: Traffic) -> int:
    """Maximum requests in flight to one broker."""
    wanted = traffic.client.get("max.in.flight.requests.per.connection", traffic.client.get("max.in.flight"))
    most = _IN_FLIGHT_IDEMPOTENT if traffic.acks == "all" else _IN_FLIGHT
    return max(1, min(int(wanted), most)) if wanted is not None else most


def whole_batch_options(bootstrap: str, traffic: Traffic) -> Options:
    """Return the settings of a client that sends whole batches: a batch ends at its number of records.

    So none waits for ``linger.ms``. With a short linger, a busy machine would split batches, and librdkafka spins while the
    second halves wait. The rest is flushed at the end.
    """
    records = batch_records(traffic)
    bytes_max = 2 * records * (traffic.payload.record_bytes + _RECORD_OVERHEAD_BYTES)
    defaults = producer_options(bootstrap, traffic) | {
        "linger.ms": _LINGER_MS,
        "batch.num.messages": records,
        "batch.size": min(_BATCH_BYTES_MAX, max(bytes_max, _REQUEST_BYTES_MIN)),
        "message.max.bytes": min(_BATCH_BYTES_MAX, max(bytes_max, _REQUEST_BYTES_MIN)),
        "queue.buffering.max.kbytes": max(_QUEUE_KIB, _BROKERS * in_flight(traffic) * bytes_max // 1024),
    }
    return defaults | traffic.client


def due_batch_options(bootstrap: str, traffic: Traffic, records_per_s: float) -> Options:
    """Return the settings of an open-loop client: a batch that is not full waits until all of it has been passed on."""
    alone = not traffic.linger_ms and records_per_s <= _RECORDS_PER_S_ALONE
    return whole_batch_options(bootstrap, traffic) | {"linger.ms": 0 if alone else _HAND_OVER_MS} | traffic.client


def producer_options(bootstrap: str, traffic: Traffic) -> Options:
    """Return the settings of one producer. All producers together buffer about the same, whatever their number."""
    defaults: Options = {
        "bootstrap.servers": bootstrap,
        "log_level": 0,
        "acks": traffic.acks,
        "enable.idempotence": traffic.acks == "all",
        "linger.ms": traffic.linger_ms,
        "batch.size": traffic.batch_bytes,
        "batch.num.messages": traffic.batch_records or _BATCH_RECORDS_MAX,
        "compression.type": traffic.compression,
        "message.max.bytes": max(_REQUEST_BYTES_MIN, traffic.payload.record_bytes + _RECORD_OVERHEAD_BYTES),
        "queue.buffering.max.messages": _QUEUE_RECORDS,
        "queue.buffering.max.kbytes": max(_QUEUE_KIB_MIN, _QUEUE_KIB // traffic.producers),
    }
    return defaults | traffic.client


def consumer_options(bootstrap: str, readers: Readers, *, earliest: bool) -> Options:
    """Return the settings of one consumer. Its queue is bounded, so that a thousand of them fit into memory.

    When its queue is full, a consumer waits ``_QUEUE_FULL_MS`` before it fetches again. librdkafka waits a second by default;
    the queue runs empty meanwhile, and a fast server looks slow.
    """
    members = readers.groups * readers.consumers
    defaults: Options = {
        "bootstrap.servers": bootstrap,
        "log_level": 0,
        "auto.offset.reset": "earliest" if earliest else "latest",
        "enable.auto.commit": True,
        "group.protocol": readers.protocol,
        "queued.max.messages.kbytes": max(1024, _QUEUE_KIB // members),
        "fetch.queue.backoff.ms": _QUEUE_FULL_MS,
    }
    return defaults | readers.client


def validate(traffic: Traffic) -> None:
    """Raise ``Invalid`` that names the setting and its bound."""
    if not 0.0 <= traffic.payload.random_ratio <= 1.0:
        raise Invalid(f"random ratio is {traffic.payload.random_ratio}; it must be from 0 to 1")
    if traffic.processes > traffic.producers:
        raise Invalid(f"--processes is {traffic.processes}; maximum is the number of producers, {traffic.producers}")


def as_document(*settings: msgspec.Struct, **more: object) -> dict[str, Any]:
    """Return all settings in one flat mapping; those of topics and nested ones keep their own."""
    document: dict[str, Any] = {}
    for struct in settings:
        fields = msgspec.to_builtins(struct)
        document |= {"topics": fields} if isinstance(struct, Topics) else fields
    return document | {name: msgspec.to_builtins(value) for name, value in more.items()}
