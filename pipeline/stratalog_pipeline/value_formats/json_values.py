"""JSON values as Python values that Arrow takes, by a schema: Spark's DDL, or JSON Schema.

Fields that the schema lacks are ignored, missing ones are null; a value of another type than the schema's does not decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final, TypedDict

import msgspec
import pyarrow as pa

from stratalog_core.errors import Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.value_formats.ddl import DEPTH_MAX, parse_ddl

DECODING_ERRORS: Final = MALFORMED
DECIMALS_MAX: Final = 38
"""Digits after the point that Arrow's decimals have at most."""
Decode = Callable[[bytes], Any]
Check = Callable[[Any], None]


def parse_schema(text: str) -> pa.StructType:
    """Return the type of rows that ``text`` describes: JSON Schema if it is a JSON object, else DDL. Raises ``Invalid``."""
    if not text.lstrip().startswith("{"):
        return parse_ddl(text)
    try:
        document = msgspec.json.decode(text)
    except MALFORMED as malformed:
        raise Invalid(f"this is not a JSON Schema: {malformed}") from malformed
    try:
        kind = _JsonSchema(document).of(document, "value", 0)
    except (AttributeError, TypeError) as malformed:
        raise Invalid(f"this is not a JSON Schema: {malformed}") from malformed
    if not pa.types.is_struct(kind):
        raise Invalid(f"the schema describes {kind}, not objects with properties; give it as DDL")
    return kind


def decoder(kind: pa.StructType) -> Decode:
    """Return a function that decodes one object. It raises one of ``DECODING_ERRORS``, or ``ValueError``."""
    decode: Decode = msgspec.json.Decoder(_python_type(kind)).decode
    check = _check_of_decimals(kind)
    if check is None:
        return decode

    def checked(content: bytes) -> Any:
        row = decode(content)
        check(row)
        return row

    return checked


def _check_of_decimals(kind: pa.DataType) -> Check | None:
    """Return a function that raises ``ValueError`` for a number that Arrow must not get; None if the type has no decimals.

    Arrow (26) ends the process by a segmentation fault for a number such as 1e-1000000000.
    """
    if pa.types.is_decimal(kind):
        return _check_decimal
    if pa.types.is_struct(kind):
        checks = [(field.name, check) for field in kind if (check := _check_of_decimals(field.type)) is not None]
        return partial(_check_fields, checks) if checks else None
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        of_each = _check_of_decimals(kind.value_type if pa.types.is_list(kind) else kind.item_type)
        return partial(_check_each, of_each) if of_each is not None else None
    return None


def _check_decimal(number: Decimal | None) -> None:
    exponent = 0 if number is None else number.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -DECIMALS_MAX:
        raise ValueError(f"a number has {-exponent} decimal places; maximum is {DECIMALS_MAX}")


def _check_fields(checks: Sequence[tuple[str, Check]], row: Mapping[str, Any] | None) -> None:
    if row is not None:
        for name, check in checks:
            check(row.get(name))


def _check_each(check: Check, values: Mapping[str, Any] | Sequence[Any] | None) -> None:
    for value in values.values() if isinstance(values, Mapping) else values or ():
        check(value)


def _python_type(kind: pa.DataType) -> Any:
    if pa.types.is_struct(kind):
        return TypedDict("Row", {field.name: _python_type(field.type) | None for field in kind}, total=False)  # type: ignore[operator]
    if pa.types.is_map(kind):
        return dict[str, _python_type(kind.item_type) | None]  # type: ignore[misc]
    if pa.types.is_list(kind):
        return list[_python_type(kind.value_type) | None]  # type: ignore[misc]
    if pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    if pa.types.is_timestamp(kind):
        return datetime
    for matches, found in _PYTHON_TYPES:
        if matches(kind):
            return found
    raise AssertionError(f"{kind} is no type of a schema")


_PYTHON_TYPES: Final[tuple[tuple[Callable[[pa.DataType], bool], type], ...]] = (
    (pa.types.is_string, str),
    (pa.types.is_boolean, bool),
    (pa.types.is_floating, float),
    (pa.types.is_binary, bytes),
    (pa.types.is_date, date),
    (pa.types.is_decimal, Decimal),
)


class _JsonSchema:
    """Maps one document of JSON Schema, as far as its objects are rows of a table."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def of(self, schema: Any, place: str, depth: int) -> pa.DataType:
        if depth > DEPTH_MAX:
            raise Invalid(f"{place}: the schema is nested deeper than {DEPTH_MAX}, or contains itself; give it as DDL")
        if not isinstance(schema, Mapping):
            raise self._unfit(place, f"{schema!r}")
        if "$ref" in schema:
            return self.of(self._referred(schema["$ref"], place), place, depth + 1)
        kind = self._kind(schema, place)
        if isinstance(kind, Mapping):
            return self.of(kind, place, depth + 1)
        if kind in _JSON_TYPES:
            return _JSON_TYPES[kind]
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            return pa.list_(pa.field("element", self.of(schema["items"], f"{place}[]", depth + 1)))
        if kind == "object" and schema.get("properties"):
            properties = schema["properties"].items()
            return pa.struct([(name, self.of(each, f"{place}.{name}", depth + 1)) for name, each in properties])
        if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
            return pa.map_(pa.string(), self.of(schema["additionalProperties"], f"{place}{{}}", depth + 1))
        raise self._unfit(place, f"type {kind!r} without items or properties")

    def _kind(self, schema: Mapping[str, Any], place: str) -> Any:
        """The name of the only type besides null, or the only alternative besides null."""
        for word in ("oneOf", "anyOf", "allOf"):
            if word in schema:
                others = [each for each in schema[word] if not (isinstance(each, Mapping) and each.get("type") == "null")]
                if len(others) != 1:
                    raise self._unfit(place, f"{word} of {len(others)} types")
                return others[0]
        kind = schema.get("type")
        if kind is None and "properties" in schema:
            return "object"
        if kind is None and schema.get("enum") and all(isinstance(each, str) for each in schema["enum"]):
            return "string"
        if isinstance(kind, list):
            others = [each for each in kind if each != "null"]
            if len(others) != 1:
                raise self._unfit(place, f"type {kind}")
            return others[0]
        return kind

    def _referred(self, reference: Any, place: str) -> Any:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise self._unfit(place, f"$ref {reference!r} to another document")
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            raise self._unfit(place, f"$ref {reference!r} to nothing")
        return found

    @staticmethod
    def _unfit(place: str, what: str) -> Invalid:
        return Invalid(f"{place}: {what} has no type in a table; give the schema as DDL, without this field or as it is")


_JSON_TYPES: Final[Mapping[Any, pa.DataType]] = {
    "string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(),
}  # fmt: skip
