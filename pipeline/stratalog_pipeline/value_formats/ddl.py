"""Types as Spark's SQL writes them (``flight string, delays array<int>``), as Arrow types. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from stratalog_core.errors import Invalid
from stratalog_core.natural_numbers import natural_number
from stratalog_pipeline.arrow.schema import TIMESTAMP_TYPE

DEPTH_MAX: Final = 50
_TOKEN: Final = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|([A-Za-z0-9_]+)|([<>(),:]))")
_SIMPLE: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(), "byte": pa.int8(), "tinyint": pa.int8(), "short": pa.int16(), "smallint": pa.int16(),
    "int": pa.int32(), "integer": pa.int32(), "long": pa.int64(), "bigint": pa.int64(), "float": pa.float32(),
    "real": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": TIMESTAMP_TYPE, "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip


def parse_ddl(text: str) -> pa.StructType:
    """Return the type of rows with the columns that ``text`` lists. Raises ``Invalid`` that says where it is malformed."""
    return _Parser(text).columns()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise Invalid(f"schema: {text[at : at + 20]!r} is unexpected; it must look like 'flight string, delay int'")
            self._tokens.append(match[0].strip())
            at = match.end()
        self._next = 0

    def columns(self) -> pa.StructType:
        if len(self._tokens) > 1 and self._tokens[0].lower() == "struct" and self._tokens[1] == "<":
            kind = self._type(0)
        else:
            kind = self._fields("", 0)
        if self._peek():
            raise self._unexpected()
        return kind

    def _fields(self, end: str, depth: int) -> pa.StructType:
        fields = [self._field(depth)]
        while self._peek() == ",":
            self._take(",")
            fields.append(self._field(depth))
        if end:
            self._take(end)
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise Invalid(f"schema: a column is named twice: {', '.join(names)}")
        return pa.struct(fields)

    def _field(self, depth: int) -> pa.Field:
        name = self._word()
        if self._peek() == ":":
            self._take(":")
        kind = self._type(depth)
        if self._peek().lower() == "not":
            # Ignored, as in a read by Spark: values may lack the field anyway.
            self._take("not")
            self._take("null")
        return pa.field(name[1:-1].replace("``", "`") if name.startswith("`") else name, kind)

    def _type(self, depth: int) -> pa.DataType:
        if depth > DEPTH_MAX:
            raise Invalid(f"schema: types are nested deeper than {DEPTH_MAX}")
        word = self._word().lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in ("decimal", "dec", "numeric"):
            return self._decimal()
        if word == "array":
            self._take("<")
            items = self._type(depth + 1)
            self._take(">")
            return pa.list_(pa.field("element", items))
        if word == "map":
            self._take("<")
            keys = self._type(depth + 1)
            self._take(",")
            values = self._type(depth + 1)
            self._take(">")
            if not pa.types.is_string(keys):
                raise Invalid("schema: keys of maps are strings")
            return pa.map_(keys, values)
        if word == "struct":
            self._take("<")
            return self._fields(">", depth + 1)
        raise Invalid(f"schema: type {word!r} is unknown; known are {', '.join(_SIMPLE)}, decimal, array, map and struct")

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._peek() == "(":
            self._take("(")
            precision = self._number()
            if self._peek() == ",":
                self._take(",")
                scale = self._number()
            self._take(")")
        if not 0 < precision <= 38 or scale > precision:
            raise Invalid(f"schema: decimal({precision},{scale}); maximum is 38 digits")
        return pa.decimal128(precision, scale)

    def _number(self) -> int:
        word = self._word()
        number = natural_number(word, 999)
        if number is None:
            raise Invalid(f"schema: {word!r} is not a number of digits")
        return number

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _word(self) -> str:
        word = self._peek()
        if not word or word in "<>(),:":
            raise self._unexpected()
        self._next += 1
        return word

    def _take(self, expected: str) -> None:
        if self._peek().lower() != expected:
            raise self._unexpected()
        self._next += 1

    def _unexpected(self) -> Invalid:
        where = " ".join(self._tokens[max(0, self._next - 3) : self._next + 1]) or "nothing"
        return Invalid(f"schema: unexpected end or word after {where!r} in {self._text[:200]!r}")
