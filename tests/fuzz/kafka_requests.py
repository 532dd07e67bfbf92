"""One sound request of every version of every API that is served, with something in every field, made by kio."""

from __future__ import annotations

import datetime
import struct
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin
from uuid import UUID

from kio.index import load_request_schema

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.frame import is_flexible
from stratalog_core.records import Record, build_batch

TOPIC = "fuzzed"
_VALUES: dict[str, Any] = {
    "int8": 1, "int16": 1, "int32": 1, "int64": 1, "uint16": 1, "uint32": 1, "float64": 1.0, "bool": True, "string": TOPIC,
    "uuid": UUID(int=7), "bytes": b"content",
    "timedelta_i32": datetime.timedelta(milliseconds=1), "timedelta_i64": datetime.timedelta(milliseconds=1),
}  # fmt: skip


def batch() -> bytes:
    return bytes(build_batch([Record(offset=0, timestamp_ms=1_000, key=b"k", value=b"v")]))


def entity(schema: type[Any], topic_id: UUID) -> Any:
    """A struct with one element in each array."""
    return schema(**{field.name: _value(field.type, field.metadata.get("kafka_type"), topic_id) for field in fields(schema)})


def _value(kind: Any, kafka_type: str | None, topic_id: UUID) -> Any:
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    if get_origin(kind) is tuple:
        return (_value(get_args(kind)[0], kafka_type, topic_id),)
    if NoneType in get_args(kind) and len(arguments) == 1:
        return _value(arguments[0], kafka_type, topic_id)
    if is_dataclass(kind):
        return entity(kind, topic_id)  # type: ignore[arg-type]  # kio's schemas are classes
    assert kafka_type is not None
    if kafka_type == "records":
        return batch()
    return topic_id if kafka_type == "uuid" else _VALUES[kafka_type]


def frame(api_key: int, version: int, body: bytes, correlation: int = 1) -> bytes:
    """A request without its length field."""
    head = struct.pack(">hhih", api_key, version, correlation, 4) + b"fuzz"
    return head + (b"\x00" if is_flexible(api_key, version) else b"") + body


def sound_frame(api_key: int, version: int, topic_id: UUID = _VALUES["uuid"]) -> bytes:
    return frame(api_key, version, encode_entity(entity(load_request_schema(api_key, version), topic_id)))


@cache
def sound_frames() -> tuple[bytes, ...]:
    """By API and version."""
    return tuple(
        sound_frame(key, version)
        for key, info in sorted(HANDLERS.items())
        for version in range(info.min_version, info.max_version + 1)
    )
