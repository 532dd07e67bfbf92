"""The columns that the data source yields: exactly those of Spark's Kafka source, as Arrow types.

``headers`` is included on request (``includeHeaders``). A user's schema selects columns, which is the only column pruning for
Python data sources: unselected keys, values and headers are validated but not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from stratalog_core.errors import Invalid

TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")
HEADER_TYPE: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
HEADERS_TYPE: Final = pa.list_(pa.field("element", HEADER_TYPE))

ARROW_TYPES: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": TIMESTAMP_TYPE,
    "timestampType": pa.int32(),
    "headers": HEADERS_TYPE,
}
COLUMNS: Final = tuple(name for name in ARROW_TYPES if name != "headers")
COLUMNS_WITH_HEADERS: Final = tuple(ARROW_TYPES)

SPARK_DDL: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Type of each column as Spark prints it (``DataType.simpleString``)."""


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of ``columns`` for Arrow."""
    return pa.schema([(name, ARROW_TYPES[name]) for name in columns])


def check_columns(wanted: Sequence[tuple[str, str]], types: Mapping[str, str] = SPARK_DDL) -> tuple[str, ...]:
    """Return the names in a user's schema of ``(name, Spark type)``. Raises ``Invalid`` for an unknown name or a wrong type."""
    for name, spark_type in wanted:
        if name not in types:
            raise Invalid(f"schema: column {name!r} is unknown; the source has {', '.join(types)}")
        if spark_type != types[name]:
            raise Invalid(f"schema: column {name!r} is {types[name]}, not {spark_type}; cast it after the load")
    names = [name for name, _ in wanted]
    if len(set(names)) != len(names):
        raise Invalid("schema: it has a column twice")
    return tuple(names)
