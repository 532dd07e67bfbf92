"""Checks every length in a request before kio decodes it.

kio's decoder reserves memory for as many elements as an array claims to have: ten bytes can request thirty gigabytes, and the
process is killed. So a request is first checked against its schema: an array must fit into the remaining bytes, the elements of
all arrays together into ``ELEMENTS_MAX`` (each becomes an object many times its size), and a known tagged field into its stated
size. Null is accepted only for nullable arrays; kio accepts it for any. kio decodes an accepted request in memory proportional
to its size.

Unknown tagged fields must be ignored (KIP-482), but kio refuses them; the check removes them.

A schema is compiled once into steps; consecutive fields of fixed size are one step.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, is_dataclass
from types import NoneType
from typing import Any, Final, get_args, get_origin

from kio.index import load_request_schema

from stratalog_broker.protocol.frame import ELEMENTS_MAX, read_uvarint, write_uvarint
from stratalog_core.errors import Corrupt

_FIXED_BYTES: Final = {
    "int8": 1, "uint8": 1, "bool": 1, "int16": 2, "uint16": 2, "error_code": 2, "int32": 4, "uint32": 4, "timedelta_i32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "timedelta_i64": 8, "datetime_i64": 8, "uuid": 16,
}  # fmt: skip
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")


class _Walk:
    """The position in one request's body. ``cuts``: ``(start, end, replacement)`` of removed parts, ascending."""

    __slots__ = ("body", "cuts", "elements_left", "position")

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.position = 0
        self.elements_left = ELEMENTS_MAX
        self.cuts: list[tuple[int, int, bytes]] = []

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.body):
            raise Corrupt(f"a request of {len(self.body)} bytes is cut short: a field ends at byte {self.position}")

    def unpack(self, field: struct.Struct) -> int:
        at = self.position
        self.skip(field.size)
        return int(field.unpack_from(self.body, at)[0])

    def uvarint(self) -> int:
        value, self.position = read_uvarint(self.body, self.position)
        return value

    def count(self, elements: int, least_bytes: int) -> None:
        """Raise ``Corrupt`` unless ``elements`` elements, each of at least ``least_bytes``, can follow."""
        self.elements_left -= elements
        if elements * least_bytes > len(self.body) - self.position:
            raise Corrupt(f"a request claims {elements} elements in {len(self.body) - self.position} bytes")
        if self.elements_left < 0:
            raise Corrupt(f"a request has more than {ELEMENTS_MAX} elements: use several requests")

    def without_cuts(self, start: int, end: int, cuts: Sequence[tuple[int, int, bytes]]) -> bytes:
        """Return the body from ``start`` to ``end`` with each of ``cuts`` replaced."""
        pieces: list[bytes] = []
        for cut_start, cut_end, instead in cuts:
            pieces += (bytes(self.body[start:cut_start]), instead)
            start = cut_end
        return b"".join((*pieces, bytes(self.body[start:end])))


_Step = Callable[[_Walk], None]


def checked_request(api_key: int, api_version: int, body: memoryview) -> memoryview:
    """Return the request as bytes that kio can decode, without trailing bytes. Raises ``Corrupt``. The version is served."""
    walk = _Walk(body)
    _request_step(api_key, api_version)(walk)
    if not walk.cuts:
        return body[: walk.position]
    return memoryview(walk.without_cuts(0, walk.position, walk.cuts))


@functools.cache
def _request_step(api_key: int, api_version: int) -> _Step:
    return _sequence(_entity_steps(load_request_schema(api_key, api_version)))


def _entity_steps(schema: type[Any]) -> list[_Step | int]:
    """Return the steps of a struct in wire order; an integer is a run of that many bytes."""
    flexible = schema.__flexible__
    plain = [field for field in fields(schema) if "tag" not in field.metadata]
    steps: list[_Step | int] = [step for field in plain for step in _field_steps(field, flexible)]
    if flexible:
        tagged = {field.metadata["tag"]: field for field in fields(schema) if "tag" in field.metadata}
        steps.append(_tagged({tag: _sequence(_field_steps(field, flexible, tagged=True)) for tag, field in tagged.items()}))
    return _merged(steps)


def _merged(steps: Sequence[_Step | int]) -> list[_Step | int]:
    merged: list[_Step | int] = []
    for step in steps:
        if isinstance(step, int) and merged and isinstance(merged[-1], int):
            merged[-1] += step
        else:
            merged.append(step)
    return merged


def _sequence(steps: Sequence[_Step | int]) -> _Step:
    calls = tuple(_fixed(step) if isinstance(step, int) else step for step in steps)
    if len(calls) == 1:
        return calls[0]

    def walk_all(walk: _Walk) -> None:
        for call in calls:
            call(walk)

    return walk_all


def _field_steps(field: Field[Any], flexible: bool, *, tagged: bool = False) -> list[_Step | int]:
    kind: Any = field.type
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    nullable = NoneType in get_args(kind)
    if nullable and len(arguments) == 1:
        (kind,) = arguments
    if get_origin(kind) is tuple:
        return [_array(_value_steps(get_args(kind)[0], field, flexible), flexible, nullable)]
    steps = _value_steps(kind, field, flexible)
    return [_optional(_sequence(steps))] if nullable and is_dataclass(kind) and not tagged else steps


def _value_steps(kind: Any, field: Field[Any], flexible: bool) -> list[_Step | int]:
    if is_dataclass(kind):
        return _entity_steps(kind)  # type: ignore[arg-type]  # kio's schemas are classes, not instances
    kafka_type = field.metadata["kafka_type"]
    if kafka_type in _FIXED_BYTES:
        return [_FIXED_BYTES[kafka_type]]
    if flexible:
        return [_compact]
    return [_string if kafka_type == "string" else _bytes]


def _fixed(size: int) -> _Step:
    return lambda walk: walk.skip(size)


def _string(walk: _Walk) -> None:
    walk.skip(max(walk.unpack(_I16), 0))


def _bytes(walk: _Walk) -> None:
    walk.skip(max(walk.unpack(_I32), 0))


def _compact(walk: _Walk) -> None:
    walk.skip(max(walk.uvarint() - 1, 0))


def _optional(step: _Step) -> _Step:
    """Return the step of a nullable struct; a first byte below 0 means null (KIP-893)."""

    def walk_optional(walk: _Walk) -> None:
        at = walk.position
        walk.skip(1)
        if walk.body[at] < 0x80:
            step(walk)

    return walk_optional


def _array(element: Sequence[_Step | int], flexible: bool, nullable: bool) -> _Step:
    fixed_bytes = element[0] if len(element) == 1 and isinstance(element[0], int) else 0
    step = _sequence(element)

    def walk_array(walk: _Walk) -> None:
        elements = walk.uvarint() - 1 if flexible else walk.unpack(_I32)
        if elements <= 0:
            if elements and not nullable:
                raise Corrupt(f"a request has no array (null) before byte {walk.position}, where there must be one")
            return
        walk.count(elements, fixed_bytes or 1)
        if fixed_bytes:
            walk.skip(elements * fixed_bytes)
        else:
            for _ in range(elements):
                step(walk)

    return walk_array


def _tagged(known: dict[int, _Step]) -> _Step:
    def walk_tagged(walk: _Walk) -> None:
        body, position = walk.body, walk.position
        if position < len(body) and not body[position]:  # nearly always: none
            walk.position = position + 1
            return
        first_cut, kept = len(walk.cuts), []
        tags = walk.uvarint()
        walk.count(tags, 2)
        for _ in range(tags):
            tag, size = walk.uvarint(), walk.uvarint()
            start, cuts, step = walk.position, len(walk.cuts), known.get(tag, _fixed(size))
            step(walk)
            if walk.position != start + size:
                raise Corrupt(f"a tagged field of {size} bytes ends at byte {walk.position} instead of {start + size}")
            if tag in known:
                content = walk.without_cuts(start, walk.position, walk.cuts[cuts:])
                kept.append(write_uvarint(tag) + write_uvarint(len(content)) + content)
        if len(kept) < tags or len(walk.cuts) > first_cut:
            walk.cuts[first_cut:] = [(position, walk.position, write_uvarint(len(kept)) + b"".join(kept))]

    return walk_tagged
