"""The values that ``serializers.py`` writes and ``spark_values.py`` reads: their schemas, and what a reader must find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

COUNT: Final = 400
_FIELDS: Final[list[Mapping[str, Any]]] = [
    {"name": "flight", "type": "string"},
    {"name": "delay", "type": ["null", "int"], "default": None},
    {"name": "departed", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
    {"name": "tags", "type": {"type": "array", "items": "string"}},
]
_GATE: Final[Mapping[str, Any]] = {"name": "gate", "type": "string", "default": "unknown"}
AVRO_VERSIONS: Final = tuple(
    json.dumps({"type": "record", "name": "Flight", "namespace": "flights", "fields": fields})
    for fields in (_FIELDS, [*_FIELDS, _GATE])
)
"""The second has one more field. The first half of the values is written with the first."""
JSON_SCHEMA: Final = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Flight",
        "type": "object",
        "properties": {
            "flight": {"type": "string"},
            "delay": {"type": ["integer", "null"]},
            "origin": {"type": "object", "properties": {"code": {"type": "string"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    }
)
MESSAGE: Final = "flights.Flight"
PROTO: Final = """syntax = "proto3";
package flights;

import "airports.proto";
import "google/protobuf/timestamp.proto";

message Other {}

message Flight {
  string flight = 1;
  optional sint32 delay = 2;
  Airport origin = 3;
  google.protobuf.Timestamp departed = 4;
  repeated string tags = 5;
}
"""
"""The messages' file as Java's serializer registers it. The one of Python registers descriptors."""


def topic(prefix: str, value_format: str) -> str:
    """Return the topic with values of a format."""
    return f"{prefix}-{value_format}"


def text_subject(prefix: str) -> str:
    """Return the subject of ``PROTO``."""
    return f"{topic(prefix, 'protobuf')}-text"


def written(value_format: str, number: int) -> dict[str, Any]:
    """Return a value as its serializer takes it; one of Protobuf is still to be made a message."""
    row: dict[str, Any] = {"flight": f"UA{number}", "tags": [f"tag {each}" for each in range(number % 3)]}
    row["delay"] = None if number % 5 == 0 else number % 90 - 30
    if value_format != "avro":
        row["origin"] = {"code": ("EWR", "JFK", "LGA")[number % 3]}
    if value_format != "json":
        row["departed"] = datetime(2013, 1, 1, tzinfo=UTC) + timedelta(minutes=number, milliseconds=number)
    if value_format == "avro":
        row["price"] = Decimal(number * 7) / 100
    if value_format == "avro" and number >= COUNT // 2:
        row["gate"] = f"C{number % 40}"
    return row


def expected(value_format: str, number: int) -> dict[str, Any]:
    """Return what a reader with the newest schema finds."""
    row = written(value_format, number)
    return {"gate": "unknown", **row} if value_format == "avro" else row
