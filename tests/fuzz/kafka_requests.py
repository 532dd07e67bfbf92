"""Requests of every version of every API that is served, made by kio's schemas: sound ones, with something in every field."""

from __future__ import annotations

import datetime
import struct
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Protocol, get_args, get_origin
from uuid import UUID

from kio.index import load_request_schema

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.frame import is_flexible
from stratalog_core.batches.records import Record, build_batch

TOPIC = "fuzzed"
_VALUES: dict[str, Any] = {
    "int8": 1, "int16": 1, "int32": 1, "int64": 1, "uint16": 1, "uint32": 1, "float64": 1.0, "bool": True, "string": TOPIC,
    "uuid": UUID(int=7), "bytes": b"content",
    "timedelta_i32": datetime.timedelta(milliseconds=1), "timedelta_i64": datetime.timedelta(milliseconds=1),
}  # fmt: skip


def batch() -> bytes:
    return bytes(build_batch([Record(offset=0, timestamp_ms=1_000, key=b"k", value=b"v")]))


class Draw(Protocol):
    """Chooses what stands in the fields of a request; ``owner`` is the name of the struct."""

    def value(self, owner: str, field: str, kafka_type: str) -> Any: ...

    def elements(self, owner: str, field: str) -> int:
        """How many elements an array has."""
        ...

    def is_null(self, owner: str, field: str) -> bool:
        """Whether a field that may be null is."""
        ...


class Sound:
    """One element in each array, something in each field."""

    def __init__(self, topic_id: UUID) -> None:
        self._topic_id = topic_id

    def value(self, owner: str, field: str, kafka_type: str) -> Any:
        if kafka_type == "records":
            return batch()
        return self._topic_id if kafka_type == "uuid" else _VALUES[kafka_type]

    def elements(self, owner: str, field: str) -> int:
        return 1

    def is_null(self, owner: str, field: str) -> bool:
        return False


def entity(schema: type[Any], draw: Draw) -> Any:
    """A request, or a struct of one."""
    return schema(**{field.name: _value(schema.__name__, field, field.type, draw) for field in fields(schema)})


def _value(owner: str, field: Field[Any], kind: Any, draw: Draw) -> Any:
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    if get_origin(kind) is tuple:
        return tuple(_value(owner, field, arguments[0], draw) for _ in range(draw.elements(owner, field.name)))
    if NoneType in get_args(kind) and len(arguments) == 1:
        return None if draw.is_null(owner, field.name) else _value(owner, field, arguments[0], draw)
    if is_dataclass(kind):
        return entity(kind, draw)  # type: ignore[arg-type]  # kio's schemas are classes
    return draw.value(owner, field.name, field.metadata["kafka_type"])


def frame(api_key: int, version: int, body: bytes, correlation: int = 1) -> bytes:
    """A request without its length field."""
    head = struct.pack(">hhih", api_key, version, correlation, 4) + b"fuzz"
    return head + (b"\x00" if is_flexible(api_key, version) else b"") + body


def sound_frame(api_key: int, version: int, topic_id: UUID = _VALUES["uuid"]) -> bytes:
    return frame(api_key, version, encode_entity(entity(load_request_schema(api_key, version), Sound(topic_id))))


@cache
def sound_frames() -> tuple[bytes, ...]:
    """By API and version."""
    return tuple(
        sound_frame(key, version)
        for key, info in sorted(HANDLERS.items())
        for version in range(info.min_version, info.max_version + 1)
    )
