"""Values decode by their schema; what does not decode fails the read by name, or is kept beside a null."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.errors import Corrupt, Invalid, NotFound, Unavailable
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.value_formats import registry as registry_module
from stratalog_pipeline.value_formats.ddl import parse_ddl
from stratalog_pipeline.value_formats.json_values import parse_schema
from stratalog_pipeline.value_formats.protobuf import ProtobufMessages
from stratalog_pipeline.value_formats.registry import AUTH_VARIABLE, REFERENCES_MAX
from stratalog_pipeline.value_formats.values import CORRUPT_RECORD, Values, resolve

READ = {"store": "file:///nowhere", "subscribe": "orders"}
DDL = "id bigint, name string, price decimal(6,2), tags array<string>, at timestamp, inner struct<x:int,y:double>"


def values(**options: str) -> Values:
    return resolve(parse_options({**READ, **options}))


def decoded(found: Values, *contents: bytes | None) -> list[dict[str, Any]]:
    count = len(contents)
    batch = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(contents, pa.binary()),
            "topic": ["orders"] * count,
            "partition": pa.array([3] * count, pa.int32()),
            "offset": list(range(70, 70 + count)),
        }
    )
    (made,) = found.columns(("offset", "value", CORRUPT_RECORD), iter([batch]))
    rows: list[dict[str, Any]] = made.to_pylist(maps_as_pydicts="strict")
    assert [row["offset"] for row in rows] == list(range(70, 70 + count)), "no row is lost"
    return rows


def test_json_by_ddl() -> None:
    found = values(value_format="json", value_schema=DDL)
    good = (
        b'{"id": 7, "name": "\\u00e9", "price": 12.5, "tags": ["a", null], "at": "2020-01-02T03:04:05+01:00",'
        b' "inner": {"y": 1}, "unknown": [1]}'
    )
    first, tombstone, empty = decoded(found, good, None, b"{}")
    assert first["value"] == {
        "id": 7, "name": "é", "price": Decimal("12.50"), "tags": ["a", None],
        "at": datetime(2020, 1, 2, 2, 4, 5, tzinfo=UTC), "inner": {"x": None, "y": 1.0},
    }  # fmt: skip
    assert (tombstone["value"], tombstone[CORRUPT_RECORD]) == (None, None)
    assert empty["value"] == dict.fromkeys(first["value"])


BAD_JSON = (
    b"", b"{", b"null", b"[]", b'{"id": "7"}', b'{"id": 9223372036854775808}', b'{"inner": {"x": 2147483648}}', b"\xff\xfe",
    b'{"price": 1.234}', b'{"price": 123456}', b'{"name": "\\ud800"}', b'{"at": "yesterday"}', b'{"z":' * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("bad", BAD_JSON)
def test_bad_json_fails_by_name_or_is_kept(bad: bytes) -> None:
    with pytest.raises(Corrupt, match=r"orders-3, offset 71: the value cannot be decoded as json: .*value_mode=PERMISSIVE"):
        decoded(values(value_format="json", value_schema=DDL), b'{"id":1}', bad)
    rows = decoded(values(value_format="json", value_schema=DDL, value_mode="PERMISSIVE"), b'{"id":1}', bad, b'{"id":2}')
    assert [row["value"] and row["value"]["id"] for row in rows] == [1, None, 2]
    assert [row[CORRUPT_RECORD] for row in rows] == [None, bad, None]


def test_numbers_with_extreme_exponents_do_not_decode() -> None:
    """Arrow ends the process by a segmentation fault for some of them."""
    found = values(
        value_format="json",
        value_schema="d decimal(6,2), l array<decimal(6,2)>, m map<string,decimal(6,2)>, s struct<t:decimal(6,2)>",
        value_mode="permissive",
    )
    places = (b'{"d": %s}', b'{"l": [null, %s]}', b'{"m": {"a": null, "b": %s}}', b'{"s": {"t": %s}}')
    numbers = (b"1e-1000000000", b"0e-1000000000", b"1e1000000000", b"1e-39", b'"NaN"')
    bad = [place % number for place in places for number in numbers]
    good = [place % number for place in places for number in (b"12.5", b"null", b"1e3", b"0.00")]
    rows = decoded(found, *bad, *good)
    assert [row[CORRUPT_RECORD] for row in rows] == [*bad, *[None] * len(good)]
    assert rows[len(bad)]["value"]["d"] == Decimal("12.50")


def test_malformed_json_schemas_are_refused() -> None:
    for bad in ({"properties": ["a"]}, {"oneOf": 5}, {"properties": {"a": {"enum": 5}}}, {"type": [["x"]]}):
        with pytest.raises(Invalid, match="not a JSON Schema"):
            parse_schema(json.dumps(bad))


def test_ddl() -> None:
    kind = parse_ddl("a INT NOT NULL, `b ``c` map<string, array<decimal(20,0)>>, d: struct<e: date>")
    assert kind == pa.struct(
        [
            ("a", pa.int32()),
            ("b `c", pa.map_(pa.string(), pa.list_(pa.field("element", pa.decimal128(20, 0))))),
            ("d", pa.struct([("e", pa.date32())])),
        ]
    )
    assert parse_ddl("struct<a:int>") == pa.struct([("a", pa.int32())])
    for bad in BAD_DDL:
        with pytest.raises(Invalid):
            parse_ddl(bad)


BAD_DDL = (
    "", "a", "a int,", "a int b int", "a array<int", "a integers", "a int, a string", "a map<int,int>", "a decimal(50)",
    "a int; drop", "a " + "array<" * 200,
)  # fmt: skip


def test_json_schema() -> None:
    money = {"type": "object", "properties": {"amount": {"type": "number"}, "currency": {"enum": ["EUR", "USD"]}}}
    schema = {
        "$defs": {"money": money},
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "paid": {"type": ["boolean", "null"]},
            "price": {"$ref": "#/$defs/money"},
            "lines": {"type": "array", "items": {"oneOf": [{"type": "null"}, {"type": "string"}]}},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    }
    assert parse_schema(json.dumps(schema)) == pa.struct(
        [
            ("id", pa.int64()),
            ("paid", pa.bool_()),
            ("price", pa.struct([("amount", pa.float64()), ("currency", pa.string())])),
            ("lines", pa.list_(pa.field("element", pa.string()))),
            ("more", pa.map_(pa.string(), pa.int64())),
        ]
    )
    wrong: tuple[dict[str, Any], ...] = (
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "other.json"}}},
        {"properties": {"a": {}}},
        {"type": "string"},
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "object"}]}}},
    )
    for bad in wrong:
        with pytest.raises(Invalid):
            parse_schema(json.dumps(bad))


ORDER = {
    "type": "record", "name": "Order", "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    ],
}  # fmt: skip


def avro(schema: Any, row: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


def test_avro(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(ORDER))
    found = values(value_format="avro", value_schema_file=str(tmp_path / "order.avsc"), value_mode="permissive")
    row = {"id": 5, "note": None, "day": date(2013, 7, 4)}
    content = avro(ORDER, row)
    rows = decoded(found, content, content[:-1], content + b"x", None, b"")
    assert [each["value"] for each in rows] == [row, None, None, None, None]
    assert [each[CORRUPT_RECORD] for each in rows] == [None, content[:-1], content + b"x", None, b""]
    with pytest.raises(Corrupt, match="orders-3, offset 70: the value cannot be decoded as avro"):
        decoded(values(value_format="avro", value_schema=json.dumps(ORDER)), b"\x00")
    with pytest.raises(Invalid, match="value_schema_file cannot be read"):
        values(value_format="avro", value_schema_file=str(tmp_path / "none.avsc"))


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_arbitrary_bytes_never_end_a_permissive_read(content: bytes) -> None:
    schemas = {"avro": json.dumps(ORDER), "json": DDL, "protobuf": base64.b64encode(descriptors()).decode()}
    for value_format, schema in schemas.items():
        found = values(value_format=value_format, value_schema=schema, value_mode="permissive")
        (row,) = decoded(found, content)
        assert (row["value"] is None) == (row[CORRUPT_RECORD] is not None)


def descriptors(*, order: str = "order.proto", money: str = "money.proto") -> bytes:
    """What protoc makes of two files, of which one imports the other, and Protobuf's own file of timestamps."""
    made = descriptor_pb2.FileDescriptorSet()
    field = descriptor_pb2.FieldDescriptorProto
    first = made.file.add(name=money, package="shop", syntax="proto3")
    message = first.message_type.add(name="Money")
    message.field.add(name="amount", number=1, type=field.TYPE_UINT64, label=field.LABEL_OPTIONAL)
    second = made.file.add(name=order, package="shop", syntax="proto3", dependency=[money, "google/protobuf/timestamp.proto"])
    second.enum_type.add(name="State").value.add(name="OPEN", number=0)
    second.enum_type[0].value.add(name="PAID", number=1)
    second.message_type.add(name="Unused").field.add(name="x", number=1, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    message = second.message_type.add(name="Order")

    def add(name: str, kind: Any, label: Any = field.LABEL_OPTIONAL, of: str | None = None, **more: Any) -> None:
        number = len(message.field) + 1
        message.field.add(name=name, number=number, type=kind, label=label, type_name=of, **more)

    entry = message.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    add("id", field.TYPE_INT64)
    add("small", field.TYPE_UINT32)
    add("price", field.TYPE_MESSAGE, of=".shop.Money")
    add("state", field.TYPE_ENUM, of=".shop.State")
    add("at", field.TYPE_MESSAGE, of=".google.protobuf.Timestamp")
    add("tags", field.TYPE_STRING, field.LABEL_REPEATED)
    add("counts", field.TYPE_MESSAGE, field.LABEL_REPEATED, ".shop.Order.CountsEntry")
    add("raw", field.TYPE_BYTES)
    message.oneof_decl.add(name="_note")
    add("note", field.TYPE_STRING, oneof_index=0, proto3_optional=True)
    return bytes(made.SerializeToString())


PROTO = """
syntax = "proto3";
package shop;
import "money.proto";
import "google/protobuf/timestamp.proto";
enum State { OPEN = 0; PAID = 1; }
message Unused { bytes x = 1; }
message Order {
  int64 id = 1;
  uint32 small = 2;
  Money price = 3;
  State state = 4;
  google.protobuf.Timestamp at = 5;
  repeated string tags = 6;
  map<string, int32> counts = 7;
  bytes raw = 8;
  optional string note = 9;
}
"""
"""The second file of ``descriptors`` as text."""


def order_class() -> Any:
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def order() -> tuple[bytes, dict[str, Any]]:
    message = order_class()(id=-1, small=2**32 - 1, state=1, tags=["a", "b"], counts={"x": 3}, raw=b"\xff")
    message.price.amount = 2**64 - 1
    message.at.FromDatetime(datetime(2020, 1, 1, 0, 0, 0, 5, UTC))
    row = {
        "id": -1, "small": 2**32 - 1, "price": {"amount": Decimal(2**64 - 1)}, "state": "PAID",
        "at": datetime(2020, 1, 1, 0, 0, 0, 5, UTC), "tags": ["a", "b"], "counts": {"x": 3}, "raw": b"\xff", "note": None,
    }  # fmt: skip
    return message.SerializeToString(), row


def test_protobuf(tmp_path: Path) -> None:
    path = tmp_path / "order.binpb"
    path.write_bytes(descriptors())
    found = values(value_format="protobuf", value_schema_file=str(path), value_message="shop.Order", value_mode="PERMISSIVE")
    content, row = order()
    unknown = order_class()(state=9).SerializeToString()
    rows = decoded(found, content, content[:-1], unknown, None)
    assert [each["value"] and each["value"]["id"] for each in rows] == [-1, None, 0, None]
    assert rows[0]["value"] == row
    assert rows[1][CORRUPT_RECORD] == content[:-1]
    assert (rows[2]["value"]["state"], rows[2]["value"]["price"], rows[2]["value"]["at"]) == ("9", None, None)
    assert ProtobufMessages(descriptors()).kind == pa.struct([("x", pa.binary())])
    for wrong in ({"value_message": "shop.Nothing"}, {"value_schema_file": str(Path(__file__))}):
        with pytest.raises(Invalid, match="include_imports"):
            values(**{"value_format": "protobuf", "value_schema_file": str(path), "value_message": "shop.Order", **wrong})
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors())
    files.file[1].message_type[1].field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    files.file[1].message_type[1].field[0].type_name = ".shop.Order"
    with pytest.raises(Invalid, match=r"shop\.Order contains itself"):
        ProtobufMessages(files.SerializeToString(), "shop.Order")


@contextmanager
def serving(answers: dict[str, tuple[int, Any]], seen: list[str | None] | None = None) -> Iterator[str]:
    """Answer as Confluent's registry does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append(self.headers.get("Authorization"))
            status, body = answers.get(unquote(self.path), (404, {"error_code": 40403, "message": "Schema not found"}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def framed(schema_id: int, content: bytes) -> bytes:
    return struct.pack(">bI", 0, schema_id) + content


def test_avro_from_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {**ORDER, "fields": [ORDER["fields"][0], ORDER["fields"][2], {"name": "gone", "type": "string"}]}
    answers = {
        "/subjects/orders-value/versions/latest": (
            200,
            {"subject": "o", "id": 2, "version": 2, "schema": json.dumps(ORDER)},
        ),
        "/schemas/ids/1": (200, {"schema": json.dumps(old)}),
        "/schemas/ids/2": (200, {"schema": json.dumps(ORDER)}),
    }
    seen: list[str | None] = []
    monkeypatch.setenv(AUTH_VARIABLE, "me:secret")
    with serving(answers, seen) as url:
        found = values(value_format="avro", value_registry=url, value_mode="permissive")
        first = framed(1, avro(old, {"id": 1, "day": date(2013, 1, 1), "gone": "x"}))
        second = framed(2, avro(ORDER, {"id": 2, "note": "n", "day": date(2013, 1, 2)}))
        bad = (framed(9, b""), b"\x01" + second[1:], b"\x00\x00", framed(2, b""))
        rows = decoded(found, first, *bad, second, first)
        assert [row["value"] and (row["value"]["id"], row["value"]["note"]) for row in rows] == [
            (1, None), *[None] * 4, (2, "n"), (1, None)
        ]  # fmt: skip
        assert [row[CORRUPT_RECORD] for row in rows] == [None, *bad, None, None]
        assert set(seen) == {"Basic bWU6c2VjcmV0"}
        assert len(seen) == 4, "each id is asked for once"
        with pytest.raises(Invalid, match="101 schema ids of the values: is it the right registry"):
            decoded(found, *(framed(number, b"") for number in range(100, 300)))
        with pytest.raises(NotFound):
            values(value_format="avro", value_registry=url, value_subject="other")
        with pytest.raises(Invalid, match="has a schema of AVRO, but value_format is json"):
            values(value_format="json", value_registry=url)
        with pytest.raises(Invalid, match="name the schema to read their values by: value_subject"):
            values(value_format="avro", value_registry=url, subscribe="a,b")
    monkeypatch.setattr(registry_module, "_WAIT_S", 0.0)
    # A registry that is away fails the read, also a permissive one: it says nothing about the values.
    with pytest.raises(Unavailable, match="the registry does not answer"):
        decoded(found, second)


def test_values_that_avros_schemas_cannot_resolve_fail_by_name_or_are_kept() -> None:
    """A registry accepts such schemas in a subject without compatibility, or in another subject."""
    identity, note, day = ORDER["fields"]
    text = {**ORDER, "fields": [{"name": "id", "type": "string"}, note, day]}
    either = {**ORDER, "fields": [{"name": "id", "type": ["long", "string"]}, note, day]}
    without_day = {**ORDER, "fields": [identity]}
    registered = {
        1: {"schema": json.dumps(text)}, 2: {"schema": json.dumps(either)}, 3: {"schema": json.dumps(without_day)},
        4: {"schema": json.dumps({**ORDER, "name": "Receipt"})}, 5: {"schema": "{}", "schemaType": "JSON"},
        6: {"schema": "{broken"}, 7: {"schema": json.dumps(ORDER)},
    }  # fmt: skip
    answers: dict[str, tuple[int, Any]] = {f"/schemas/ids/{number}": (200, body) for number, body in registered.items()}
    answers["/subjects/orders-value/versions/latest"] = answers["/schemas/ids/7"]
    row = {"id": 5, "note": None, "day": date(2013, 7, 4)}
    good = framed(2, avro(either, row)), framed(7, avro(ORDER, row))
    bad = {
        framed(1, avro(text, {**row, "id": "5"})): "string is not long",
        framed(2, avro(either, {**row, "id": "5"})): "mismatch",
        framed(3, avro(without_day, {"id": 5})): "No default value for field day",
        framed(4, avro(ORDER, row)): "mismatch",
        framed(5, b"{}"): "id 5: it has a schema of JSON, but value_format is avro",
        framed(6, b""): "id 6: this is not an Avro schema",
    }
    seen: list[str | None] = []
    with serving(answers, seen) as url:
        found = values(value_format="avro", value_registry=url)
        for content, reason in bad.items():
            with pytest.raises(Corrupt, match=f"orders-3, offset 72: the value cannot be decoded as avro: .*{reason}"):
                decoded(found, *good, content)
        found = values(value_format="avro", value_registry=url, value_mode="permissive")
        seen.clear()
        rows = decoded(found, *good, *bad, *bad)
        assert [each["value"] for each in rows] == [row, row, *[None] * 12]
        assert [each[CORRUPT_RECORD] for each in rows] == [None, None, *bad, *bad]
        assert len(seen) == 7, "each id is asked for once"


def test_logical_types_that_do_not_fit_their_type_are_ignored() -> None:
    """As the specification says, and as Spark's own Avro source does."""
    kinds: dict[str, Any] = {
        "a": {"type": "bytes", "logicalType": "decimal"},
        "b": {"type": "string", "logicalType": "decimal", "precision": 5},
        "c": {"type": "long", "logicalType": "date"},
        "d": {"type": "string", "logicalType": "timestamp-millis"},
        "e": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2},
    }
    schema = {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    found = values(value_format="avro", value_schema=json.dumps(schema))
    assert found.kind() == pa.struct(
        [("a", pa.binary()), ("b", pa.string()), ("c", pa.int64()), ("d", pa.string()), ("e", pa.decimal128(5, 2))]
    )
    stored = {**schema, "fields": [{"name": name, "type": kind["type"]} for name, kind in kinds.items()]}
    content = avro(stored, {"a": b"x", "b": "1.5", "c": 7, "d": "now", "e": b"\x00\xfa"})
    row = {"a": b"x", "b": "1.5", "c": 7, "d": "now", "e": Decimal("2.50")}
    assert [each["value"] for each in decoded(found, content)] == [row]


def test_a_registry_that_limits_requests_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hosted ones do, which many tasks ask at once."""
    monkeypatch.setattr(registry_module, "_WAIT_S", 0.0)
    seen: list[str | None] = []
    path = "/subjects/orders-value/versions/latest"
    with serving({path: (429, {})}, seen) as url, pytest.raises(Unavailable, match="429 Too Many Requests"):
        values(value_format="avro", value_registry=url)
    assert len(seen) == registry_module.ATTEMPTS
    with serving({path: (403, {})}) as url, pytest.raises(Invalid, match="403 Forbidden"):
        values(value_format="avro", value_registry=url)


def test_avro_with_references_from_a_registry() -> None:
    currency = {"type": "enum", "name": "Currency", "namespace": "money", "symbols": ["EUR", "USD"]}
    amount_fields = [{"name": "cents", "type": "long"}, {"name": "currency", "type": "Currency"}]
    amount = {"type": "record", "name": "money.Amount", "fields": amount_fields}
    plain = {"type": "fixed", "name": "Plain", "size": 2}
    fields = [
        {"name": "price", "type": "money.Amount"},
        {"name": "fees", "type": {"type": "array", "items": ["null", "money.Amount"]}},
        {"name": "paid", "type": {"type": "map", "values": "money.Currency"}},
        {"name": "own", "type": {"type": "record", "name": "Own", "fields": [{"name": "x", "type": "int"}]}},
        {"name": "again", "type": ["null", "Own"], "default": None},
    ]
    order = {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}
    to_currency = [{"name": "money.Currency", "subject": "currency", "version": 3}]
    to_amount = [{"name": "money.Amount", "subject": "amount", "version": 1}]
    registered = {
        "/subjects/orders-value/versions/latest": (order, to_amount),
        "/schemas/ids/1": (order, to_amount),
        "/subjects/amount/versions/1": (amount, to_currency),
        "/subjects/currency/versions/3": (currency, []),
        "/subjects/twice/versions/latest": ([{"type": "record", "name": "A", "fields": []}, 7], to_amount),
        "/subjects/plain/versions/1": (plain, []),
        "/subjects/within/versions/latest": (
            {**order, "fields": [{"name": "p", "type": plain["name"]}]}, [{"name": "Plain", "subject": "plain", "version": 1}]
        ),
    }  # fmt: skip
    answers = {path: (200, {"schema": json.dumps(of), "references": to}) for path, (of, to) in registered.items()}
    whole_amount = {**amount, "fields": [amount_fields[0], {"name": "currency", "type": currency}]}
    whole = {**order, "fields": [{"name": "price", "type": whole_amount}, *fields[1:]]}
    row = {
        "price": {"cents": 5, "currency": "USD"}, "fees": [None, {"cents": 1, "currency": "EUR"}], "paid": {"me": "EUR"},
        "own": {"x": 1}, "again": {"x": 2},
    }  # fmt: skip
    with serving(answers) as url:
        found = values(value_format="avro", value_registry=url)
        assert [each["value"] for each in decoded(found, framed(1, avro(whole, row)))] == [row]
        with pytest.raises(Invalid, match="one of its references is none"):
            values(value_format="avro", value_registry=url, value_subject="twice")
        # A name within a namespace is of that namespace, so this one refers to nothing.
        with pytest.raises(Invalid, match="this is not an Avro schema"):
            values(value_format="avro", value_registry=url, value_subject="within")
    many = {
        f"/subjects/{number}/versions/1": (
            200, {"schema": "{}", "references": [{"name": "n", "subject": str(number + 1), "version": 1}]}
        )
        for number in range(REFERENCES_MAX + 1)
    }  # fmt: skip
    latest = {"/subjects/orders-value/versions/latest": many["/subjects/0/versions/1"]}
    with serving({**many, **latest}) as url, pytest.raises(Invalid, match=f"more than {REFERENCES_MAX} others"):
        values(value_format="avro", value_registry=url)


def test_json_and_protobuf_from_a_registry() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors())
    base, top = (base64.b64encode(file.SerializeToString()).decode() for file in files.file)
    references = [{"name": "money.proto", "subject": "money", "version": 4}]
    shape = json.dumps({"properties": {"a": {"type": "integer"}}})
    registered = {
        "orders-value/versions/latest": {"schema": shape, "schemaType": "JSON"},
        "p/versions/latest?format=serialized": {"schema": top, "schemaType": "PROTOBUF", "references": references},
        "money/versions/4?format=serialized": {"schema": base, "schemaType": "PROTOBUF"},
        "text/versions/latest?format=serialized": {"schema": PROTO, "schemaType": "PROTOBUF", "references": references},
        "group/versions/latest?format=serialized": {"schema": "message A { group B = 1", "schemaType": "PROTOBUF"},
    }
    answers = {f"/subjects/{path}": (200, body) for path, body in registered.items()}
    content, row = order()
    with serving(answers) as url:
        rows = decoded(values(value_format="json", value_registry=url), framed(4, b'{"a": 7}'))
        assert rows[0]["value"] == {"a": 7}
        options = {"value_format": "protobuf", "value_registry": url, "value_subject": "p", "value_mode": "permissive"}
        found = values(**options, value_message="shop.Order")
        # The second message of its file: one index, 1, as zigzag varints.
        other = (framed(4, b"\x00" + content), framed(4, b"\x04\x02\x00" + content), framed(4, b"\xff\xff"), framed(4, b""))
        rows = decoded(found, framed(4, b"\x02\x02" + content), *other)
        assert [each["value"] for each in rows] == [row, None, None, None, None]
        # A schema that was registered as text, and refers to one that was not.
        found = values(**{**options, "value_subject": "text"}, value_message="shop.Order")
        assert [each["value"] for each in decoded(found, framed(4, b"\x02\x02" + content))] == [row]
        with pytest.raises(Invalid, match=r"'group' is not understood: group\.proto, line 1: 'group' is .* value_schema_file"):
            values(value_format="protobuf", value_registry=url, value_subject="group")


def test_a_message_of_protobuf_may_have_had_another_place_in_its_file() -> None:
    """Registries accept a version that adds or moves messages; old values have the indexes of theirs."""
    body = "{ int64 id = 1; }"
    latest = 'syntax = "proto3"; package shop; message Audit { string who = 1; } message Order ' + body
    first = 'syntax = "proto3"; package shop; message Order ' + body
    nested = 'syntax = "proto3"; package shop; message Audit { message Order { string who = 1; } }'
    registered = {
        "/subjects/orders-value/versions/latest?format=serialized": latest,
        "/schemas/ids/1?format=serialized": first,
        "/schemas/ids/3?format=serialized": nested,
        "/schemas/ids/4?format=serialized": "edition",
    }
    answers: dict[str, tuple[int, Any]] = {
        path: (200, {"schema": text, "schemaType": "PROTOBUF"}) for path, text in registered.items()
    }
    answers["/schemas/ids/5?format=serialized"] = (200, {"schema": "{}", "schemaType": "JSON"})
    order = b"\x08\x07"
    old, new = framed(1, b"\x00" + order), framed(2, b"\x02\x02" + order)
    # Of the nested message; of none; of schemas that are unusable, of another format, and unknown.
    bad = (
        framed(3, b"\x04\x00\x00" + order),
        framed(1, b"\x02\x04" + order),
        *(framed(each, b"\x00" + order) for each in (4, 5, 6)),
    )
    seen: list[str | None] = []
    with serving(answers, seen) as url:
        options = {"value_format": "protobuf", "value_registry": url, "value_message": "shop.Order"}
        found = values(**options, value_mode="permissive")
        seen.clear()
        rows = decoded(found, new, old, *bad, *bad, old)
        assert [each["value"] for each in rows] == [{"id": 7}, {"id": 7}, *[None] * 10, {"id": 7}]
        assert len(seen) == 6, "an id is asked for once"
        with pytest.raises(Corrupt, match=r"orders-3, offset 70: .* it is message shop\.Audit\.Order, not shop\.Order"):
            decoded(values(**options), bad[0])


def test_another_message_of_protobuf_may_have_had_the_place_of_the_wanted_one() -> None:
    """Its fields have the same numbers, so it would decode. A schema that cannot be used says nothing against a value."""
    order, audit = "message Order { int64 id = 1; }", "message Audit { int64 at = 1; }"
    head = 'syntax = "proto3"; package shop; '
    registered = {
        "/subjects/orders-value/versions/latest?format=serialized": f"{head}{audit} {order}",
        "/schemas/ids/1?format=serialized": f"{head}{order} {audit}",
        "/schemas/ids/2?format=serialized": f"{head}{audit} {order}",
        "/schemas/ids/3?format=serialized": f"{head}{order}",
        "/schemas/ids/4?format=serialized": "edition",
    }
    answers: dict[str, tuple[int, Any]] = {
        path: (200, {"schema": text, "schemaType": "PROTOBUF"}) for path, text in registered.items()
    }
    second = b"\x02\x02\x08\x07"
    seen: list[str | None] = []
    with serving(answers, seen) as url:
        options = {"value_format": "protobuf", "value_registry": url, "value_message": "shop.Order"}
        found = values(**options, value_mode="permissive")
        seen.clear()
        rows = decoded(found, *(framed(schema_id, second) for schema_id in (1, 2, 3, 4, 5, 1, 2, 4, 5)))
        assert [each["value"] for each in rows] == [None, {"id": 7}, None, *[{"id": 7}] * 2, None, *[{"id": 7}] * 3]
        assert len(seen) == 5, "an id is asked for once"
        with pytest.raises(Corrupt, match=r"it is message shop\.Audit, not shop\.Order"):
            decoded(values(**options), framed(1, second))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"value_schema": "a int"}, "needs value_format"),
        ({"value_format": "xml", "value_schema": "a int"}, "must be one of avro, json, protobuf"),
        ({"value_format": "json"}, "give one of value_schema, value_schema_file and value_registry"),
        ({"value_format": "json", "value_schema": "a int", "value_schema_file": "f"}, "give one of"),
        ({"value_format": "json", "value_schema": "a int", "value_subject": "s"}, "value_subject"),
        ({"value_format": "json", "value_schema": "a int", "value_message": "m"}, "value_message"),
        ({"value_format": "json", "value_schema": "a int", "value_mode": "drop"}, "must be one of failfast, permissive"),
        ({"value_format": "json", "value_schema": "a int", "table": "blocks"}, "leave out option 'table'"),
        ({"value_format": "json", "value_registry": "registry:8081"}, "must be a URL like"),
        ({"value_format": "json", "value_registry": "http://u:p@registry"}, "must not have credentials"),
        ({"value_format": "protobuf", "value_schema": "message A {}"}, "FileDescriptorSet in Base64"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        values(**options)
