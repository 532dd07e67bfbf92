"""Avro files read split by split: each record once, however the file is cut, with the types of Spark's own Avro source."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
import zstandard

from stratalog_core.errors import Corrupt, Invalid, NotFound
from stratalog_pipeline.value_formats.avro import arrow_type, decoder, parse_schema
from stratalog_pipeline.value_formats.avro_files import find_splits, read_schema, read_splits

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": ["int", "long"]}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "PAID"]}},
        {"name": "before", "type": ["null", "State"], "default": None},
        {"name": "token", "type": {"type": "string", "logicalType": "uuid"}},
    ],
}


def order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "note": f"note {number}" if number % 3 else None,
        "at": datetime.fromtimestamp(1_600_000_000 + number / 1000, UTC),
        "day": date(2013, 1, 1 + number % 28),
        "price": Decimal(number).scaleb(-2),
        "tags": ["a"] * (number % 4),
        "counts": {"x": number},
        "state": "PAID" if number % 2 else "OPEN",
        "before": "OPEN" if number % 2 else None,
        "token": "8d8ac610-566d-4ef0-9c22-186b2a5ed793",
    }


def write(path: Path, rows: list[dict[str, Any]], schema: Any = SCHEMA, codec: str = "null", block_bytes: int = 1000) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows, codec=codec, sync_interval=block_bytes)
    return str(path)


def read(path: str, split_bytes: int = 64 * 1024 * 1024) -> list[dict[str, Any]]:
    schema = read_schema(path)
    batches = [batch for task in find_splits([path], split_bytes) for batch in read_splits(task, schema, must_be_same=True)]
    return [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "bzip2", "xz"])
def test_every_record_is_read_once_however_the_file_is_cut(tmp_path: Path, codec: str) -> None:
    rows = [order(number) for number in range(300)]
    path = write(tmp_path / "orders.avro", rows, codec=codec)
    for split_bytes in (100, 777, 5000, 10**6):
        found = read(path, split_bytes)
        assert [row["id"] for row in found] == list(range(300)), split_bytes
        assert found == rows


def test_blocks_compressed_by_zstandard_are_read(tmp_path: Path) -> None:
    """Made by hand: fastavro writes them with one more package only."""
    plain = Path(write(tmp_path / "plain.avro", [order(number) for number in range(3)], block_bytes=10**6)).read_bytes()
    sync, at = plain[-16:], plain.index(plain[-16:]) + 16
    header = plain[: at - 16].replace(b"\x14avro.codec\x08null", b"\x14avro.codec\x12zstandard")
    count, content = plain[at : at + 1], plain[at + 3 : -16]
    assert count == b"\x06"
    packed = zstandard.compress(content)
    size = BytesIO()
    fastavro.schemaless_writer(size, "long", len(packed))
    path = tmp_path / "packed.avro"
    path.write_bytes(header + sync + count + size.getvalue() + packed + sync)
    assert read(str(path)) == [order(number) for number in range(3)]


def test_a_split_that_begins_at_any_byte_of_the_file_finds_the_next_block(tmp_path: Path) -> None:
    path = write(tmp_path / "orders.avro", [order(number) for number in range(20)], block_bytes=200)
    for split_bytes in range(1, 400, 7):
        assert [row["id"] for row in read(path, split_bytes)] == list(range(20)), split_bytes


def test_small_files_share_a_task_and_directories_are_searched(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "in" / f"day={number}" / "part.avro", [order(number)])
    write(tmp_path / "in" / "_temporary" / "part.avro", [order(9)])
    (tmp_path / "in" / "readme.txt").write_text("no data")
    tasks = find_splits([str(tmp_path / "in")])
    assert [len(task) for task in tasks] == [5]
    assert len(find_splits([f"file://{tmp_path}/in"], split_bytes=1000)) > 1
    schema = read_schema(tasks[0][0].path)
    rows = pa.Table.from_batches(read_splits(tasks[0], schema, must_be_same=True))
    assert rows["id"].to_pylist() == [0, 1, 2, 3, 4]
    with pytest.raises(NotFound, match=r"has no file \*\.avro"):
        find_splits([str(tmp_path / "elsewhere")])


def test_another_schema_is_refused_unless_one_is_given_to_read_all(tmp_path: Path) -> None:
    first = write(tmp_path / "a.avro", [order(1)])
    narrow = {"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "id", "type": "int"}]}
    other = write(tmp_path / "b.avro", [{"id": 2}], narrow)
    (task,) = find_splits([first, other])
    with pytest.raises(Invalid, match=r"b\.avro has another schema than the first file; name one for all with --avro-schema"):
        list(read_splits(task, read_schema(first), must_be_same=True))
    given = parse_schema(json.dumps({**SCHEMA, "fields": SCHEMA["fields"][:2]}))
    rows = pa.Table.from_batches(read_splits(task, given, must_be_same=False)).to_pylist()
    assert rows == [{"id": 1, "note": "note 1"}, {"id": 2, "note": None}]
    without_default = parse_schema(json.dumps({**SCHEMA, "fields": [SCHEMA["fields"][2]]}))
    with pytest.raises(Invalid, match="the given schema cannot read it"):
        list(read_splits(task, without_default, must_be_same=False))


def test_damage_names_file_and_block(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "orders.avro", [order(number) for number in range(100)], codec="deflate"))
    content = bytearray(path.read_bytes())
    at = len(content) - 300
    content[at : at + 100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=r"orders\.avro, block at byte \d+"):
        read(str(path))
    path.write_bytes(bytes(content[: len(content) - 150]))
    with pytest.raises(Corrupt, match=r"orders\.avro, block at byte \d+"):
        read(str(path))
    path.write_bytes(b"PAR1 and more")
    with pytest.raises(Invalid, match=r"orders\.avro is not an Avro file"):
        read(str(path))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ('{"type": "record"', "not an Avro schema"),
        ('{"type": "record", "name": "r", "fields": [{"name": "x", "type": "y"}]}', "not an Avro schema"),
        ('["string", "long"]', "value: a union of string, long has no type in a table"),
        (
            '{"type": "record", "name": "r", "fields": [{"name": "next", "type": ["null", "r"]}]}',
            r"value\.next: type r contains itself",
        ),
        ('{"type": "array", "items": "null"}', "items without content"),
        ('{"type": "bytes", "logicalType": "decimal", "precision": 50}', "maximum is 38 digits"),
    ],
)
def test_schemas_without_a_type_are_refused(schema: str, problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        arrow_type(parse_schema(schema))


def test_a_datum_must_be_whole() -> None:
    decode = decoder(parse_schema('"string"'))
    assert decode(b"\x04ab") == "ab"
    with pytest.raises(ValueError, match="1 bytes follow the value"):
        decode(b"\x04abc")
    with pytest.raises(EOFError):
        decode(b"\x04a")
