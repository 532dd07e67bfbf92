"""Protobuf: messages of a FileDescriptorSet as Arrow types and as Python values that Arrow takes.

Enums are their names; a number without a name is its digits. Unsigned integers of 32 bits are bigint, those of 64 bits
decimal(20,0), and ``google.protobuf.Timestamp`` is a timestamp. Refused: messages that contain themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.schema import TIMESTAMP_TYPE

DECODING_ERRORS: Final = (DecodeError, ValueError, OverflowError)
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_WELL_KNOWN: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (any_pb2, duration_pb2, empty_pb2, field_mask_pb2, timestamp_pb2, wrappers_pb2)
}
"""Files that schemas import without including them. Values of any shape (``struct.proto``) have no type in a table."""
_TYPES: Final[dict[int, pa.DataType]] = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(), FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(), FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(), FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(), FieldDescriptor.CPPTYPE_ENUM: pa.string(),
    FieldDescriptor.CPPTYPE_STRING: pa.string(),
}  # fmt: skip
Getter = Callable[[Any], Any]


class ProtobufMessages:
    """The messages of one kind: their type, their place among the messages of their file, and their decoder."""

    def __init__(self, descriptors: bytes, name: str = "") -> None:
        """``descriptors`` is a serialized FileDescriptorSet, ``name`` the full name of the message.

        Without a name it is the first of the last file, which protoc writes after those that it imports. Raises ``Invalid``.
        """
        self._descriptor = _find(descriptors, name)
        self.kind: pa.StructType = pa.struct(_fields(self._descriptor, ()))
        self._of = _row_getter(self._descriptor)
        self._class = message_factory.GetMessageClass(self._descriptor)

    @property
    def place(self) -> tuple[int, ...]:
        """Indexes of the message within its file, those of the messages around it first: a registry's message indexes."""
        found, indexes = self._descriptor, []
        while found is not None:
            around = found.containing_type
            names = around.nested_types if around is not None else found.file.message_types_by_name.values()
            indexes.append([each.full_name for each in names].index(found.full_name))
            found = around
        return tuple(reversed(indexes))

    @property
    def name(self) -> str:
        """The full name of the message."""
        return str(self._descriptor.full_name)

    def decode(self, content: bytes) -> Any:
        """Return the message in ``content`` as a dict. Raises one of ``DECODING_ERRORS``."""
        return self._of(self._class.FromString(content))


def message_name(file: bytes, indexes: tuple[int, ...]) -> str:
    """Return the full name of the message at a registry's message indexes in a serialized FileDescriptorProto.

    Raises ``ValueError`` if there is none.
    """
    try:
        described = descriptor_pb2.FileDescriptorProto.FromString(file)
    except DecodeError as malformed:
        raise ValueError(f"its schema's descriptor is malformed: {malformed}") from malformed
    names, messages = [described.package] if described.package else [], described.message_type
    for index in indexes:
        if not 0 <= index < len(messages):
            raise ValueError(f"its schema has no message with indexes {list(indexes)}")
        names.append(messages[index].name)
        messages = messages[index].nested_type
    return ".".join(names)


def _find(descriptors: bytes, name: str) -> Descriptor:
    files = descriptor_pb2.FileDescriptorSet()
    pool = descriptor_pool.DescriptorPool()
    try:
        files.ParseFromString(descriptors)
        _add_all(pool, files.file)
        if not name:
            last = files.file[-1]
            name = f"{last.package}.{last.message_type[0].name}".lstrip(".")
        return pool.FindMessageTypeByName(name)
    except (DecodeError, IndexError) as malformed:
        raise Invalid(
            "this is not a FileDescriptorSet with a message: make it by protoc --include_imports -o FILE"
        ) from malformed
    except KeyError as missing:
        raise Invalid(f"the descriptors have no message {name!r}, or lack a file: make them by --include_imports") from missing
    except TypeError as inconsistent:
        raise Invalid(f"the descriptors do not fit together: {inconsistent}; make them by --include_imports") from inconsistent


def _add_all(pool: descriptor_pool.DescriptorPool, files: Sequence[descriptor_pb2.FileDescriptorProto]) -> None:
    """Add files after those that they import; those of Protobuf itself are known."""
    given = {file.name for file in files}
    for file in files:
        for imported in file.dependency:
            if imported in _WELL_KNOWN and imported not in given:
                given.add(imported)
                pool.AddSerializedFile(_WELL_KNOWN[imported])
        pool.AddSerializedFile(file.SerializeToString())


def _fields(message: Descriptor, around: tuple[str, ...]) -> list[pa.Field]:
    if message.full_name in around:
        raise Invalid(f"message {message.full_name} contains itself, which a table cannot")
    inside = (*around, message.full_name)
    return [pa.field(field.name, _field_type(field, inside)) for field in message.fields]


def _field_type(field: FieldDescriptor, around: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        keys, values = field.message_type.fields
        return pa.map_(_one_type(keys, around), _one_type(values, around))
    kind = _one_type(field, around)
    return pa.list_(pa.field("element", kind)) if field.is_repeated else kind


def _one_type(field: FieldDescriptor, around: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            return TIMESTAMP_TYPE
        fields = _fields(field.message_type, around)
        if not fields:
            raise Invalid(f"{field.full_name}: a message without fields has no type in a table")
        return pa.struct(fields)
    return pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else _TYPES[field.cpp_type]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _row_getter(message: Descriptor) -> Getter:
    getters = [(field.name, _field_getter(field)) for field in message.fields]
    return lambda row: {name: getter(row) for name, getter in getters}


def _field_getter(field: FieldDescriptor) -> Getter:
    name = field.name
    if _is_map(field):
        of = _converter(field.message_type.fields[1])
        return lambda row: [(key, of(value)) for key, value in getattr(row, name).items()]
    of = _converter(field)
    if field.is_repeated:
        return lambda row: [of(each) for each in getattr(row, name)]
    if field.has_presence:
        return lambda row: of(getattr(row, name)) if row.HasField(name) else None
    return lambda row: of(getattr(row, name))


def _converter(field: FieldDescriptor) -> Getter:
    if field.message_type is not None:
        return _microseconds if field.message_type.full_name == _TIMESTAMP else _row_getter(field.message_type)
    if field.enum_type is not None:
        names = {value.number: value.name for value in reversed(field.enum_type.values)}
        return lambda number: names.get(number) or str(number)
    return lambda value: value


def _microseconds(value: Any) -> int:
    return int(value.seconds) * 1_000_000 + int(value.nanos) // 1000
