"""Options of the data source, parsed and checked: those of Spark's Kafka source, and a few of ours.

Names are case-insensitive, as everywhere in Spark. An unknown name is refused, and the error suggests the nearest known one.
``kafka.bootstrap.servers`` adds what is not in the bucket yet, read from the brokers, which also report the bucket's URL; the
other ``kafka.*`` options configure that client (librdkafka) and have no effect without it. So a job moves from Kafka by
changing the format's name. Source for Kafka's options: Spark's "Structured Streaming + Kafka Integration Guide". Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast, get_args
from uuid import UUID

import msgspec

from stratalog_core.errors import Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.option_values import INTEGER_MAX, choice, duration_s, flag, integer, natural
from stratalog_pipeline.value_options import VALUE_OPTIONS, ValueOptions, parse_value_options

EARLIEST: Final = -2
LATEST: Final = -1
SPLIT_BYTES: Final = 64 * 1024 * 1024
POLL_TIMEOUT_MS: Final = 120_000
TRIGGER_DELAY_S: Final = 900.0
"""This and the one before are defaults of Spark's own source."""

Table: TypeAlias = Literal["records", "segments", "blocks", "batches", "manifests", "tail"]
"""The rows of a read: a topic's records, or what is known about them (``metadata_tables.py``)."""

MissingTail: TypeAlias = Literal["warn", "fail", "ignore"]
"""Report of a read without brokers that ends at the latest record: log a warning, fail the query, or say nothing."""

Mode: TypeAlias = Literal["batch", "stream", "either"]
"""The kind of read that options are for. ``either``: not known yet; only options that both kinds refuse are refused."""

PerPartition: TypeAlias = dict[str, dict[int, int]]
"""Topic name to partition to an offset (``EARLIEST``, ``LATEST``) or a time in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllAt:
    """Every partition starts or ends at its first record (``EARLIEST``) or after its last (``LATEST``)."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtOffsets:
    """An offset for each partition; the start is inclusive, the end exclusive."""

    offsets: PerPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTimestamp:
    """Every partition starts or ends at its first record at or after ``timestamp_ms`` (milliseconds since 1970)."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTimestamps:
    """A timestamp for each partition, with the meaning of :class:`AtTimestamp`."""

    timestamps_ms: PerPartition


Bound: TypeAlias = AllAt | AtOffsets | AtTimestamp | AtTimestamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Exactly these partitions."""

    partitions: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribed:
    """All partitions of exactly these topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """All partitions of every topic whose whole name the pattern matches."""

    pattern: str

    def matches(self, topic: str) -> bool:
        return re.fullmatch(self.pattern, topic) is not None


Wanted: TypeAlias = Assigned | Subscribed | Matching


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The parsed options of one read. ``split_bytes`` counts stored bytes; ``records_per_split_max`` 0 means no bound.

    ``store`` is empty if the brokers of ``client`` are to be asked for it; ``second_store`` is the store of a second copy, read
    where the first fails or is damaged, empty for none.

    ``topic_ids`` select a topic if several in the bucket share its name. ``missing_timestamp_is_latest``: a partition without a
    record at or after the start time is read from its end, instead of failing the query. ``fail_on_data_loss``: requested
    offsets that are missing fail the query, instead of being left out. ``skips_corrupt``: damaged blocks, and batches that
    cannot be read, are left out and logged, instead of failing the query.

    ``rows_per_trigger_max`` (0: no bound) and ``rows_per_trigger_min`` bound the offsets of a stream's batch; fewer than the
    minimum wait for up to ``trigger_delay_max_s``. They mean nothing in a batch read.

    ``expiry_header`` names the header by which records expire; rows of expired ones are left out. Empty: none expire.
    ``columns`` are the wanted ones, empty for all. ``manifest_versions`` are the versions of history to read, empty for the
    newest; such a read has no tail.
    ``client`` configures the client that reads from the brokers (librdkafka's names); empty: only the bucket is read, and
    ``missing_tail`` says how a read up to the latest record reports that newer records may exist. ``poll_timeout_s`` bounds the
    wait for the brokers' next record. ``takes_lease``: a batch read holds a lease on what it reads.
    """

    store: str
    wanted: Wanted
    second_store: str = ""
    topic_ids: frozenset[UUID] = frozenset()
    start: Bound = AllAt(position=EARLIEST)
    end: Bound = AllAt(position=LATEST)
    missing_timestamp_is_latest: bool = False
    min_partitions: int = 1
    records_per_split_max: int = 0
    split_bytes: int = SPLIT_BYTES
    fail_on_data_loss: bool = True
    skips_corrupt: bool = False
    include_headers: bool = False
    expiry_header: str = ""
    read_committed: bool = True
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    missing_tail: MissingTail = "warn"
    poll_timeout_s: float = POLL_TIMEOUT_MS / 1000
    table: Table = "records"
    columns: tuple[str, ...] = ()
    manifest_versions: PerPartition = field(default_factory=dict)
    rows_per_trigger_max: int = 0
    rows_per_trigger_min: int = 0
    trigger_delay_max_s: float = TRIGGER_DELAY_S
    takes_lease: bool = True
    values: ValueOptions | None = None


KNOWN: Final = (
    "path", "store", "assign", "subscribe", "subscribePattern", "topicIds", "startingOffsets", "endingOffsets",
    "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingTimestamp", "endingTimestamp",
    "startingOffsetsByTimestampStrategy", "minPartitions", "maxRecordsPerPartition", "splitBytes", "failOnDataLoss",
    "includeHeaders", "isolationLevel", "missingTail", "onCorruptBatch", "kafkaConsumer.pollTimeoutMs", "table",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "columns", "manifestVersion", "secondStore", "lease",
    "expiryHeader",
    *VALUE_OPTIONS,
)  # fmt: skip
CLIENT: Final = "kafka."
IGNORED: Final = ("fetchoffset.", "kafkaconsumer.cache.", "groupidprefix")
"""Options of Spark's Kafka source without a counterpart here: every read has a client of its own and joins no group."""
BOOTSTRAP: Final = "bootstrap.servers"
ISOLATION: Final = "kafka.isolation.level"
REFUSED: Final = ("auto.offset.reset", "enable.auto.commit", "interceptor.classes", "key.deserializer", "value.deserializer")
"""Options of clients that Spark's Kafka source refuses too: the source itself decides what is read and how."""


def parse_options(given: Mapping[str, str], mode: Mode = "batch") -> ReadOptions:
    """Parse the options of one read. Raises ``Invalid`` that names the option, the problem and the remedy."""
    options = {name.lower(): text for name, text in given.items()}
    for name in given:
        check_known(name)
    _check_refused(options)
    versions = _manifest_versions(options, mode)
    start, end = _bound(options, "starting", mode), _bound(options, "ending", mode)
    if mode == "batch":
        _check_order(start, end)
    return ReadOptions(
        store=_store(options),
        second_store=options.get("secondstore", "").strip(),
        wanted=_wanted(options),
        topic_ids=_topic_ids(options.get("topicids", "")),
        start=start,
        end=end,
        missing_timestamp_is_latest=choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        min_partitions=integer(options, "minPartitions", 1, 1),
        records_per_split_max=integer(options, "maxRecordsPerPartition", 0, 1),
        split_bytes=integer(options, "splitBytes", SPLIT_BYTES, 1),
        fail_on_data_loss=flag(options, "failOnDataLoss", True),
        skips_corrupt=_skips_corrupt(options),
        include_headers=flag(options, "includeHeaders", False),
        expiry_header=options.get("expiryheader", ""),
        read_committed=_isolation(options) == "read_committed",
        client=client_options(options),
        missing_tail="ignore" if versions else _missing_tail(options, mode),
        poll_timeout_s=integer(options, "kafkaConsumer.pollTimeoutMs", POLL_TIMEOUT_MS, 1) / 1000,
        table=_table(options, mode),
        columns=_columns(options),
        manifest_versions=versions,
        rows_per_trigger_max=integer(options, "maxOffsetsPerTrigger", 0, 1),
        rows_per_trigger_min=integer(options, "minOffsetsPerTrigger", 0, 1),
        trigger_delay_max_s=duration_s(options, "maxTriggerDelay", TRIGGER_DELAY_S),
        takes_lease=flag(options, "lease", True),
        values=parse_value_options(options),
    )


def check_known(name: str, names: Sequence[str] = KNOWN, prefixes: tuple[str, ...] = (CLIENT, *IGNORED)) -> None:
    """Raise ``Invalid`` with the nearest known name unless ``name`` is in ``names`` or begins with one of ``prefixes``."""
    known = {option.lower(): option for option in names}
    lower = name.lower()
    if lower in known or lower.startswith(prefixes):
        return
    near = [known[one] for one in difflib.get_close_matches(lower, known, 1)]
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"
    raise Invalid(f"option {name!r} is unknown{hint}", option=name)


def _check_refused(options: Mapping[str, str]) -> None:
    for name in REFUSED:
        if CLIENT + name in options:
            raise Invalid(f"option '{CLIENT}{name}' is not supported: leave it out; startingOffsets says where a read begins")
    least, most = (integer(options, name, 0, 1) for name in ("minOffsetsPerTrigger", "maxOffsetsPerTrigger"))
    if most and least > most:
        raise Invalid(f"option 'minOffsetsPerTrigger' is {least}; maximum is maxOffsetsPerTrigger, {most}")


def _check_order(start: Bound, end: Bound) -> None:
    """Raise ``Invalid`` if a partition's start is given after its end, by offsets or by times."""
    if isinstance(start, AtOffsets) and isinstance(end, AtOffsets):
        firsts, ends = start.offsets, end.offsets
    elif isinstance(start, AtTimestamps) and isinstance(end, AtTimestamps):
        firsts, ends = start.timestamps_ms, end.timestamps_ms
    else:
        return
    for topic, partitions in firsts.items():
        for number, first in partitions.items():
            last = ends.get(topic, {}).get(number, first)
            if first > last >= 0:
                raise Invalid(f"{topic}-{number} starts at {first}, which is after its end, {last}: exchange or correct them")


def _store(options: Mapping[str, str]) -> str:
    places = {options[name].strip() for name in ("path", "store") if options.get(name, "").strip()}
    if len(places) > 1:
        raise Invalid("options 'path' and 'store' contradict each other: give one of them")
    if not places and not client_options(options):
        raise Invalid(
            "options 'path' and 'store' are both missing: give one of them, such as file:///dir or s3://bucket/prefix, or"
            f" {CLIENT}{BOOTSTRAP}, whose brokers report the URL"
        )
    return places.pop() if places else ""


def _table(options: Mapping[str, str], mode: Mode) -> Table:
    table = cast("Table", choice(options, "table", get_args(Table)))
    if table != "records" and mode == "stream":
        raise Invalid(f"option 'table': {table!r} cannot be streamed; read it as a batch")
    of_records = ("starting", "ending", "includeHeaders", "expiryHeader")
    useless = [name for name in KNOWN if name.startswith(of_records) and name.lower() in options]
    if table != "records" and useless:
        raise Invalid(f"option {useless[0]!r} has no effect on table {table!r}: leave it out, and filter the rows if needed")
    return table


def _missing_tail(options: Mapping[str, str], mode: Mode) -> MissingTail:
    chosen = cast("MissingTail", choice(options, "missingTail", ("warn", "fail", "ignore")))
    if chosen == "fail" and mode == "stream" and not client_options(options):
        raise Invalid(
            "option 'missingTail' is 'fail', and a stream without brokers never has the tail: set "
            f"{CLIENT}{BOOTSTRAP}, or missingTail to ignore"
        )
    return chosen


def _skips_corrupt(options: Mapping[str, str]) -> bool:
    skips = choice(options, "onCorruptBatch", ("fail", "skip")) == "skip"
    if skips and options.get("table", "records").strip().lower() != "records":
        raise Invalid("option 'onCorruptBatch' leaves out records, so 'skip' cannot be used with another table: leave it out")
    return skips


def _columns(options: Mapping[str, str]) -> tuple[str, ...]:
    if "columns" not in options:
        return ()
    columns = tuple(name.strip() for name in options["columns"].split(",") if name.strip())
    if not columns or len(set(columns)) != len(columns):
        raise Invalid(f"option 'columns' must name different columns, with commas between them, not {options['columns']!r}")
    return columns


def _manifest_versions(options: Mapping[str, str], mode: Mode) -> PerPartition:
    if "manifestversion" not in options:
        return {}
    if mode == "stream" or client_options(options):
        what = "a stream" if mode == "stream" else f"{CLIENT}{BOOTSTRAP}"
        raise Invalid(f"option 'manifestVersion' reads history as it was, so it cannot be used with {what}")
    return _per_partition("manifestVersion", options["manifestversion"], 1)


def client_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the client, from lower-case names, without their prefix; none without servers to connect to."""
    client = {name.removeprefix(CLIENT): text for name, text in options.items() if name.startswith(CLIENT)}
    return client if client.get(BOOTSTRAP, "").strip() else {}


def _wanted(options: Mapping[str, str]) -> Wanted:
    given = [name for name in ("assign", "subscribe", "subscribePattern") if name.lower() in options]
    if len(given) != 1:
        raise Invalid(f"give exactly one of the options 'assign', 'subscribe' and 'subscribePattern', not {given or 'none'}")
    text = options[given[0].lower()].strip()
    if given[0] == "assign":
        return Assigned(partitions=_assignment(text))
    if given[0] == "subscribe":
        return Subscribed(topics=_topics(text))
    if not text:
        raise Invalid("option 'subscribePattern' is empty: give a regular expression for whole names, such as flights.*")
    try:
        re.compile(text)
    except re.error as malformed:
        raise Invalid(f"option 'subscribePattern' is not a regular expression: {malformed}") from malformed
    return Matching(pattern=text)


def _topic_ids(text: str) -> frozenset[UUID]:
    try:
        return frozenset(UUID(one.strip()) for one in text.split(",") if one.strip())
    except ValueError:
        raise Invalid(f"option 'topicIds' must be comma-separated topic ids, not {text!r}") from None


def _topics(text: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not topics:
        raise Invalid("option 'subscribe' names no topic; give comma-separated names")
    return topics


def _assignment(text: str) -> dict[str, tuple[int, ...]]:
    example = '{"topic": [0, 1]}'
    try:
        assignment = msgspec.json.decode(text, type=dict[str, tuple[int, ...]])
    except MALFORMED as malformed:
        raise Invalid(f"option 'assign' must look like {example}: {malformed}") from malformed
    partitions = {topic: tuple(sorted(set(numbers))) for topic, numbers in assignment.items()}
    if not any(partitions.values()) or any(number < 0 for numbers in partitions.values() for number in numbers):
        raise Invalid(f"option 'assign' must list partitions of at least 0, like {example}")
    return partitions


def _bound(options: Mapping[str, str], side: Literal["starting", "ending"], mode: Mode) -> Bound:
    """Return one side's bound. If several options are set, the most specific wins: Timestamp, OffsetsByTimestamp, Offsets."""
    given = [name for name in KNOWN if name.startswith(side) and name.lower() in options]
    if side == "ending" and mode == "stream" and given:
        raise Invalid(f"option {given[0]!r} has no effect in a stream, which has no end")
    if (timestamp := options.get(f"{side}timestamp")) is not None:
        return AtTimestamp(timestamp_ms=natural(f"{side}Timestamp", timestamp, 0))
    if (by_partition := options.get(f"{side}offsetsbytimestamp")) is not None:
        name = f"{side}OffsetsByTimestamp"
        return AtTimestamps(timestamps_ms=_per_partition(name, by_partition, 0))
    return _offsets(f"{side}Offsets", options.get(f"{side}offsets"), mode)


_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


def _offsets(name: str, text: str | None, mode: Mode) -> Bound:
    """Return an ``…Offsets`` option. By default a batch starts at the earliest record, a stream after the latest."""
    batch_default = EARLIEST if name == "startingOffsets" else LATEST
    if text is None:
        return AllAt(position=LATEST if mode == "stream" else batch_default)
    word = text.strip().lower()
    empty, usual = (LATEST, "earliest") if batch_default == EARLIEST else (EARLIEST, "latest")
    if word in _WORDS:
        if mode == "batch" and _WORDS[word] == empty:
            raise Invalid(f"option {name!r} cannot be {text!r} in a batch read, which would be empty: use {usual!r} or offsets")
        return AllAt(position=_WORDS[word])
    offsets = _per_partition(name, text, EARLIEST)
    for topic, partitions in offsets.items():
        if mode == "batch" and empty in partitions.values():
            raise Invalid(f"option {name!r}: {empty} for topic {topic!r} would make the read empty; use {batch_default}")
    return AtOffsets(offsets=offsets)


def _per_partition(name: str, text: str, minimum: int) -> PerPartition:
    example = '{"topic": {"0": 23, "1": 42}}'
    try:
        decoded = msgspec.json.decode(text, type=dict[str, dict[str, int]])
        values = {topic: {int(number): value for number, value in by_number.items()} for topic, by_number in decoded.items()}
    except (*MALFORMED, ValueError) as malformed:
        raise Invalid(f"option {name!r} must look like {example}: {malformed}") from malformed
    given = [value for partitions in values.values() for value in partitions.values()]
    if any(value < minimum for value in given):
        raise Invalid(f"option {name!r}: a value is below {minimum}")
    if any(value > INTEGER_MAX for value in given):
        raise Invalid(f"option {name!r}: a value is above {INTEGER_MAX}")
    return values


def _isolation(options: Mapping[str, str]) -> str:
    name = "isolationLevel" if "isolationlevel" in options else ISOLATION
    return choice(options, name, ("read_committed", "read_uncommitted"))
