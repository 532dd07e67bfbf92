"""OpenMessaging Benchmark's workload and driver files, read as they are. Unknown keys are refused by name, never ignored.

Source: openmessaging/benchmark, ``Workload.java`` and the YAML files in ``workloads/`` and ``driver-kafka/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from stratalog_core.errors import Invalid, NotFound
from stratalog_loadgen.clients.payloads import file_payload
from stratalog_loadgen.processes.loads import Options, Payload
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window

_Type = TypeVar("_Type")
_Count = Annotated[int, Meta(ge=1)]
_None = Annotated[int, Meta(ge=0)]
_Amount = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_KEYS: dict[str, Literal["none", "round-robin", "random"]] = {
    "NO_KEY": "none",
    "KEY_ROUND_ROBIN": "round-robin",
    "RANDOM_NANO": "random",
}
# Java's setting names and librdkafka's; None: librdkafka has no such setting.
_JAVA_NAMES: dict[str, str | None] = {
    "auto.offset.reset": "auto.offset.reset",
    "buffer.memory": None,
    "default.api.timeout.ms": None,
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "max.block.ms": None,
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "max.poll.records": None,
    "max.request.size": "message.max.bytes",
    "key.serializer": None,
    "value.serializer": None,
    "key.deserializer": None,
    "value.deserializer": None,
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
}


class Workload(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The keys of a workload file under their own names; a rate of 0 means as fast as the cluster takes it."""

    name: str
    topics: _Count
    partitions_per_topic: _Count
    message_size: Annotated[int, Meta(ge=8)]
    subscriptions_per_topic: _Count
    producers_per_topic: _Count
    consumer_per_subscription: _Count
    producer_rate: _None
    test_duration_minutes: Annotated[float, Meta(gt=0)]
    payload_file: str | None = None
    key_distributor: Literal["NO_KEY", "KEY_ROUND_ROBIN", "RANDOM_NANO"] = "NO_KEY"
    use_randomized_payloads: bool = False
    random_bytes_ratio: _Share = 0.0
    randomized_payload_pool_size: _None = 0
    consumer_backlog_size_gb: _Amount = msgspec.field(default=0.0, name="consumerBacklogSizeGB")
    backlog_drain_ratio: float = 1.0
    warmup_duration_minutes: _Amount = 1.0


class Driver(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The keys of a driver file; the four configurations are texts in the format of Java properties."""

    name: str
    driver_class: str = ""
    replication_factor: int = -1
    reset: bool = False
    topic_config: str = ""
    common_config: str = ""
    producer_config: str = ""
    consumer_config: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A workload as this package's settings."""

    topics: Topics
    traffic: Traffic
    readers: Readers
    window: Window
    records_per_s: float
    backlog_bytes: int


def read_workload(path: Path) -> Workload:
    """Read a workload file. Raises ``Invalid`` that names the key, or ``NotFound``."""
    return _read(path, Workload)


def read_driver(path: Path) -> Driver:
    """Read a driver file. Raises ``Invalid`` that names the key, or ``NotFound``."""
    return _read(path, Driver)


def plan_of(workload: Workload, driver: Driver | None, *, payload_directory: Path) -> Plan:
    """A relative ``payloadFile`` is looked for in ``payload_directory`` and where the file says. Raises ``Invalid``."""
    driver = driver or Driver(name="defaults")
    common = client_options(driver.common_config)
    producer = common | client_options(driver.producer_config)
    producers = workload.topics * workload.producers_per_topic
    traffic = Traffic(
        payload=_payload(workload, payload_directory),
        producers=producers,
        processes=min(producers, 2),
        keys=_KEYS[workload.key_distributor],
        acks=_acks(producer),
        client={name: value for name, value in producer.items() if name not in _OURS},
        **_batches(producer),
    )
    return Plan(
        topics=Topics(
            count=workload.topics,
            partitions=workload.partitions_per_topic,
            replication_factor=driver.replication_factor,
            configs={name: str(value) for name, value in properties(driver.topic_config).items()},
        ),
        traffic=traffic,
        readers=Readers(
            groups=workload.subscriptions_per_topic,
            consumers=workload.consumer_per_subscription * workload.topics,
            client=common | client_options(driver.consumer_config),
        ),
        window=Window(warmup_s=workload.warmup_duration_minutes * 60, duration_s=workload.test_duration_minutes * 60),
        records_per_s=float(workload.producer_rate),
        backlog_bytes=round(workload.consumer_backlog_size_gb * 1e9),
    )


def properties(text: str) -> dict[str, str]:
    """Java properties, one ``name=value`` a line. Raises ``Invalid``."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.partition("=")
        if not equals:
            raise Invalid(f"{stripped!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def client_options(text: str) -> Options:
    """Java's client properties as librdkafka's; ``bootstrap.servers`` is left to ``--bootstrap``."""
    found = properties(text)
    found.pop("bootstrap.servers", None)
    renamed = {_JAVA_NAMES.get(name, name): value for name, value in found.items()}
    return {name: value for name, value in renamed.items() if name is not None}


def _payload(workload: Workload, directory: Path) -> Payload:
    if workload.use_randomized_payloads:
        pool = max(1, workload.randomized_payload_pool_size)
        return Payload(record_bytes=workload.message_size, random_ratio=workload.random_bytes_ratio, pool=pool)
    if workload.payload_file:
        named = Path(workload.payload_file)
        beside = directory / named.name
        found = beside if beside.is_file() else named
        file_payload(found, workload.message_size)
        return Payload(record_bytes=workload.message_size, file=str(found))
    return Payload(record_bytes=workload.message_size, random_ratio=0.0, pool=1)


_OURS = ("acks", "batch.size", "linger.ms", "compression.type")
"""Producer settings that the loads implement themselves, because they make the batches."""


def _batches(producer: Options) -> dict[str, Any]:
    """Return the driver's batch settings. Those that it does not set keep their defaults."""
    found: dict[str, Any] = {}
    try:
        if "batch.size" in producer:
            found["batch_bytes"] = max(1, int(producer["batch.size"]))
        if "linger.ms" in producer:
            found["linger_ms"] = float(producer["linger.ms"])
    except ValueError as wrong:
        raise Invalid(f"producerConfig: batch.size and linger.ms must be numbers: {wrong}") from wrong
    if "compression.type" in producer:
        found["compression"] = str(producer["compression.type"])
    return found


def _acks(producer: Options) -> Literal["0", "1", "all"]:
    acks = str(producer.get("acks", "all"))
    if acks in ("all", "-1"):
        return "all"
    if acks == "1":
        return "1"
    if acks == "0":
        return "0"
    raise Invalid(f"acks is {acks}; choose 0, 1 or all")


def _read(path: Path, kind: type[_Type]) -> _Type:
    if not path.is_file():
        raise NotFound(f"no file {path}")
    try:
        document: Any = yaml.safe_load(path.read_text("utf-8"))
        return msgspec.convert(document, kind, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as wrong:
        raise Invalid(f"{path}: {wrong}") from wrong
