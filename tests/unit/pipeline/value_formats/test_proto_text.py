"""Schemas of Protobuf as text: what Protobuf's descriptor pool makes of what was parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import descriptor_pool, timestamp_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Invalid
from stratalog_pipeline.value_formats.proto_text import DEPTH_MAX, TEXT_MAX, parse_proto

SHOP = """/* A comment with "quotes" { */
syntax = 'proto3';
package shop.v1;  // and another }
import public "google/protobuf/timestamp.proto";
option java_package = "x.y";
option (custom) = { a: 1 b { c: "};" } d: [ 1, 2 ] };

message Order {
  reserved 4, 10 to 20; reserved "old";
  option (custom) = true;
  int64 id = 1 [deprecated = true, json_name = "ID", (custom).part = { a: [ "]" ] }];
  optional string note = 2;
  oneof kind { option (custom) = 1; Inner inner = 3; bytes raw = 5; };
  map<string, Order.Inner> by_key_name = 6;
  map<int32, double> sums = 0x7;
  repeated sint32 numbers = 010 [packed = false];
  optional .shop.v1.Order.State state = 9;
  google.protobuf.Timestamp at = 21;
  message Inner { message Deep { string x = 1; } Deep deep = 1; State state = 2; }
  enum State {
    option allow_alias = true;
    NEW = 0; PAID = 1; DONE = 1 [deprecated = true]; LOST = -5;
    reserved 7;
  }
  string message_id = 22;
  Type type = 23;
}
enum Type { A = 0; }
service Orders {
  rpc Get(Order) returns (stream Order) { option (custom) = { y: "z" }; }
  rpc Put(Order) returns (Order);
}
"""
OLD = """package old;
message A {
  required int32 a = 1 [default = -3];
  optional string b = 2 [default = "x;}"];
  repeated B c = 3;
  extensions 100 to max;
  extend A { optional int32 ext = 101; }
  message B { optional A.B b = 1; }
}
extend A { optional int32 more = 102; }
"""


def found(text: str, message: str) -> Descriptor:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(parse_proto(text, "file.proto").SerializeToString())
    return pool.FindMessageTypeByName(message)


def shape(field: FieldDescriptor) -> tuple[Any, ...]:
    of = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.number,
        of.full_name if of else field.type,
        field.is_repeated,
        field.has_presence,
        oneof.name if oneof else None,
    )


def shapes(message: Descriptor) -> dict[str, tuple[Any, ...]]:
    return {field.name: shape(field) for field in message.fields}


def test_proto3() -> None:
    order = found(SHOP, "shop.v1.Order")
    assert shapes(order) == {
        "id": (1, FieldDescriptor.TYPE_INT64, False, False, None),
        "note": (2, FieldDescriptor.TYPE_STRING, False, True, "_note"),
        "inner": (3, "shop.v1.Order.Inner", False, True, "kind"),
        "raw": (5, FieldDescriptor.TYPE_BYTES, False, True, "kind"),
        "by_key_name": (6, "shop.v1.Order.ByKeyNameEntry", True, False, None),
        "sums": (7, "shop.v1.Order.SumsEntry", True, False, None),
        "numbers": (8, FieldDescriptor.TYPE_SINT32, True, False, None),
        "state": (9, "shop.v1.Order.State", False, True, "_state"),
        "at": (21, "google.protobuf.Timestamp", False, True, None),
        "message_id": (22, FieldDescriptor.TYPE_STRING, False, False, None),
        "type": (23, "shop.v1.Type", False, False, None),
    }
    entry = order.fields_by_name["by_key_name"].message_type
    assert entry.GetOptions().map_entry
    assert entry.fields_by_name["value"].message_type.full_name == "shop.v1.Order.Inner"
    assert {value.name: value.number for value in order.enum_types_by_name["State"].values} == {
        "NEW": 0, "PAID": 1, "DONE": 1, "LOST": -5
    }  # fmt: skip
    assert [nested.name for nested in order.nested_types if not nested.GetOptions().map_entry] == ["Inner"]


def test_proto2() -> None:
    message = found(OLD, "old.A")
    assert shapes(message) == {
        "a": (1, FieldDescriptor.TYPE_INT32, False, True, None),
        "b": (2, FieldDescriptor.TYPE_STRING, False, True, None),
        "c": (3, "old.A.B", True, False, None),
    }
    assert message.fields_by_name["a"].is_required


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('edition = "2023";', "line 1: 'edition' is unexpected"),
        ('syntax = "proto4";', "syntax 'proto4' is not supported"),
        ("message A {\n  optional group G = 1 { }\n}", "line 2: 'group' is unexpected"),
        ("message A {\n  int32 = 1;\n}", "line 2: '=' is unexpected"),
        ("message A { int32 a = x; }", "'x' is unexpected"),
        ("message A { int32 a = 99999999999; }", "'99999999999' is unexpected"),
        ("message A { int32 a = 1 [x = {)]; }", r"'\)' is unexpected"),
        ("message A {\n", "line 1: it ends too early"),
        ("message A { /* }", "'\\*' is unexpected"),
        ('import "a\\x;', "'\"' is unexpected"),
        ("", None),
        ("message A { " * (DEPTH_MAX + 2), f"nested deeper than {DEPTH_MAX}"),
        (" " * (TEXT_MAX + 1), f"maximum is {TEXT_MAX}"),
    ],
)
def test_what_does_not_parse_is_refused_with_its_line(text: str, problem: str | None) -> None:
    if problem is None:
        assert not parse_proto(text, "file.proto").message_type
        return
    with pytest.raises(Invalid, match=problem):
        parse_proto(text, "file.proto")


def is_refused(text: str) -> bool:
    """Whether a schema is refused; anything but ``Invalid`` is a failure."""
    try:
        parse_proto(text, "file.proto")
    except Invalid:
        return True
    return False


@given(st.lists(st.sampled_from([*SHOP.split(), "{", "}", ";", "group", "<", ">", "'", "-"]), max_size=40))
def test_any_words_parse_or_are_refused(words: Sequence[str]) -> None:
    is_refused(" ".join(words))
    is_refused("message A { " + " ".join(words))


def test_a_schema_that_is_cut_off_within_a_message_is_refused() -> None:
    first, end = SHOP.index("message Order {") + len("message Order {"), SHOP.index("enum Type")
    assert all(is_refused(SHOP[:cut]) for cut in range(first, end - 2))
    assert not any(is_refused(SHOP[:cut]) for cut in (end - 1, end, len(SHOP)))
