"""Avro: schemas as Arrow types, as Spark's own Avro source maps them, and data as Python values that Arrow takes.

Every field is nullable. Logical types that Spark does not map (uuid, times of day, durations) are read as their underlying
type. Refused: recursive types, and unions of types that have no common one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, Final, TypeAlias, cast

import fastavro
import pyarrow as pa
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException, UnknownType

from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.schema import TIMESTAMP_TYPE

Schema: TypeAlias = Any
"""A schema as JSON describes it, with the names of fastavro's parser added."""
Decoder: TypeAlias = Callable[[bytes], Any]
DECODING_ERRORS: Final = (
    EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, ArithmeticError, SchemaResolutionError,
)  # fmt: skip
"""Raised by fastavro for bytes that the schema does not describe, and for a writer's schema, or a value's branch of a union,
that does not resolve to the reader's; times beyond the year 9999 overflow."""
DECIMAL_PRECISION_MAX: Final = 38

_PRIMITIVES: Final[Mapping[str, pa.DataType]] = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(), "fixed": pa.binary(), "enum": pa.string(),
}  # fmt: skip
_LOGICAL: Final[Mapping[str, pa.DataType]] = {
    "date": pa.date32(), "timestamp-millis": TIMESTAMP_TYPE, "timestamp-micros": TIMESTAMP_TYPE,
    "local-timestamp-millis": pa.timestamp("us"), "local-timestamp-micros": pa.timestamp("us"),
}  # fmt: skip
_STORED_AS: Final[Mapping[str, tuple[str, ...]]] = {
    "decimal": ("bytes", "fixed"), "date": ("int",),
    **{name: ("long",) for name in _LOGICAL if "timestamp" in name},
}  # fmt: skip
_WIDER: Final = {frozenset({"int", "long"}): pa.int64(), frozenset({"float", "double"}): pa.float64()}


def parse_schema(text: str | bytes) -> Schema:
    """Return a parsed schema from its JSON. Raises ``Invalid``."""
    try:
        return fastavro.parse_schema(_without_other_logical_types(json.loads(text)))
    except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError, RecursionError) as malformed:
        raise Invalid(f"this is not an Avro schema: {malformed!r}") from malformed


def same_schema(one: Schema, other: Schema) -> bool:
    """Whether data of both schemas reads the same: names, types, order and defaults, without documentation."""
    return bool(fastavro.schema.to_parsing_canonical_form(one) == fastavro.schema.to_parsing_canonical_form(other)) and (
        arrow_type(one).equals(arrow_type(other))
    )


def decoder(writer: Schema, reader: Schema | None = None) -> Decoder:
    """Return a function that decodes one datum, all of its bytes, as ``reader`` describes it.

    It raises one of ``DECODING_ERRORS``.
    """
    if reader is writer:
        reader = None

    def decode(content: bytes) -> Any:
        stream = BytesIO(content)
        value = fastavro.schemaless_reader(stream, writer, reader)
        if stream.tell() != len(content):
            raise ValueError(f"{len(content) - stream.tell()} bytes follow the value")
        return value

    return decode


def arrow_type(schema: Schema) -> pa.DataType:
    """Return the Arrow type of what a parsed schema describes. Raises ``Invalid`` that names the field."""
    return _Types().of(schema, "value")


class _Types:
    """Maps one schema. Tracks its named types, and which of them enclose the current place."""

    def __init__(self) -> None:
        self._named: dict[str, pa.DataType] = {}
        self._open: set[str] = set()

    def of(self, schema: Schema, place: str) -> pa.DataType:
        if isinstance(schema, list):
            return self._union(schema, place)
        if isinstance(schema, str):
            return self._by_name(schema, place)
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.of(kind, place)
        made = self._complex(schema, kind, place)
        if "name" in schema:
            self._named[schema["name"]] = made
        return made

    def _complex(self, schema: Mapping[str, Any], kind: str, place: str) -> pa.DataType:
        logical: str = schema.get("logicalType", "")
        if logical == "decimal":
            return _decimal(schema, place)
        if logical in _LOGICAL:
            return _LOGICAL[logical]
        if kind in ("record", "error"):
            return self._record(schema, place)
        if kind == "array":
            items = self.of(schema["items"], f"{place}[]")
            if _takes_no_bytes(items):
                # A few bytes could claim any number of them.
                raise Invalid(f"{place}: an array of items without content cannot be read")
            return pa.list_(pa.field("element", items))
        if kind == "map":
            return pa.map_(pa.string(), self.of(schema["values"], f"{place}{{}}"))
        return _PRIMITIVES[kind] if kind in _PRIMITIVES else self._by_name(kind, place)

    def _record(self, schema: Mapping[str, Any], place: str) -> pa.DataType:
        name = cast("str", schema["name"])
        self._open.add(name)
        fields = [pa.field(each["name"], self.of(each["type"], f"{place}.{each['name']}")) for each in schema["fields"]]
        self._open.discard(name)
        return pa.struct(fields)

    def _union(self, branches: list[Schema], place: str) -> pa.DataType:
        kinds = [branch for branch in branches if branch != "null"]
        if len(kinds) == 1:
            return self.of(kinds[0], place)
        if not kinds:
            return pa.null()
        wider = _WIDER.get(frozenset(kinds)) if all(isinstance(kind, str) for kind in kinds) else None
        if wider is None:
            names = ", ".join(kind if isinstance(kind, str) else str(kind.get("name", kind["type"])) for kind in kinds)
            raise Invalid(f"{place}: a union of {names} has no type in a table; leave it out by a reader's schema")
        return wider

    def _by_name(self, name: str, place: str) -> pa.DataType:
        if name in self._open:
            raise Invalid(f"{place}: type {name} contains itself, which a table cannot")
        return _PRIMITIVES[name] if name in _PRIMITIVES else self._named[name]


def _decimal(schema: Mapping[str, Any], place: str) -> pa.DataType:
    precision, scale = schema["precision"], schema.get("scale", 0)
    if not 0 < precision <= DECIMAL_PRECISION_MAX or not 0 <= scale <= precision:
        raise Invalid(f"{place}: decimal({precision},{scale}); maximum is {DECIMAL_PRECISION_MAX} digits")
    return pa.decimal128(precision, scale)


def _takes_no_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (pa.types.is_struct(kind) and all(_takes_no_bytes(field.type) for field in kind))


def _without_other_logical_types(schema: Any) -> Any:
    """Return the schema without the logical types that are read as their underlying type; fastavro would interpret them.

    This includes logical types that do not fit their underlying type: Avro's specification has readers ignore those.
    """
    if isinstance(schema, list):
        return [_without_other_logical_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name != "logicalType" or _is_interpreted(value, schema)}
    for name in ("type", "items", "values", "fields"):
        if name in kept:
            kept[name] = _without_other_logical_types(kept[name])
    return kept


def _is_interpreted(logical: Any, schema: Mapping[str, Any]) -> bool:
    stored_as = _STORED_AS.get(logical, ()) if isinstance(logical, str) else ()
    return schema.get("type") in stored_as and (logical != "decimal" or "precision" in schema)
