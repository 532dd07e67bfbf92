"""A read's values in Avro, JSON or Protobuf: the schema to read them by, and their decoder. Resolved once, then sent to tasks.

With a registry a value begins with a zero byte and the id of the schema that it was written with (four bytes, big-endian);
Protobuf's then have the indexes of their message.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pyarrow as pa

from stratalog_core.errors import Corrupt, Invalid, NotFound
from stratalog_pipeline.arrow.schema import ARROW_TYPES
from stratalog_pipeline.options import Assigned, ReadOptions, Subscribed
from stratalog_pipeline.value_formats import json_values
from stratalog_pipeline.value_formats.registry import RegisteredSchema, Registry, file_descriptor
from stratalog_pipeline.value_options import ValueOptions

if TYPE_CHECKING:
    from stratalog_pipeline.value_formats.protobuf import ProtobufMessages

CORRUPT_RECORD: Final = "_corrupt_record"
"""The column with the bytes of a value that cannot be decoded. The column ``value`` is null then."""
REFUSED_IDS_MAX: Final = 100
"""Up to this many schema ids that are unknown or of unusable schemas count as corrupt values; more mean the wrong registry."""
_PREFIX_BYTES: Final = 5
_REGISTRY_TYPES: Final = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}
_ARROW_ERRORS: Final[tuple[type[Exception], ...]] = (pa.ArrowException, ValueError, TypeError, OverflowError)
Decode = Callable[[bytes], Any]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """How values are read. ``schema`` is Avro's JSON, DDL or JSON Schema, or a FileDescriptorSet."""

    format: str
    schema: bytes
    message: str
    registry: str
    is_permissive: bool

    def read_columns(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the stored columns from which ``columns`` makes ``names``."""
        needed = {*names, "value", *PLACE} if self.are_wanted(names) else {*names}
        return tuple(name for name in ARROW_TYPES if name in needed)

    def are_wanted(self, names: Collection[str]) -> bool:
        """Whether values must be decoded for the columns ``names``."""
        return "value" in names or CORRUPT_RECORD in names

    def kind(self) -> pa.DataType:
        """Return the type of the column ``value``. Raises ``Invalid`` for a schema without one."""
        return self._decoding()[0]

    def columns(self, names: tuple[str, ...], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the columns ``names`` of ``batches``, which have the bytes of values and ``PLACE``, with values decoded.

        Raises ``Corrupt`` for a value that does not decode, unless that is permitted.
        """
        kind, decode, errors = self._decoding()
        decoder = _Decoder(self, kind, decode, errors)
        for batch in batches:
            made = decoder.decoded(batch)
            yield pa.RecordBatch.from_arrays(
                [made[name] if name in made else batch.column(name) for name in names], list(names)
            )

    def _decoding(self) -> tuple[pa.DataType, Decode, tuple[type[Exception], ...]]:
        if self.format == "json":
            rows = json_values.parse_schema(self.schema.decode())
            return rows, self._unframed(json_values.decoder(rows)), json_values.DECODING_ERRORS
        if self.format == "protobuf":
            from stratalog_pipeline.value_formats import protobuf

            messages = protobuf.ProtobufMessages(self.schema, self.message)
            decode = _FramedProtobuf(Registry(self.registry), messages).decode if self.registry else messages.decode
            return messages.kind, decode, protobuf.DECODING_ERRORS
        avro = _avro()
        reader = avro.parse_schema(self.schema)
        kind = avro.arrow_type(reader)
        if not self.registry:
            return kind, avro.decoder(reader), avro.DECODING_ERRORS
        return kind, _FramedAvro(Registry(self.registry), reader).decode, avro.DECODING_ERRORS

    def _unframed(self, decode: Decode) -> Decode:
        return (lambda content: decode(_schema_id(content)[1])) if self.registry else decode


PLACE: Final = ("topic", "partition", "offset")
"""Columns that say where a value is."""


def resolve(options: ReadOptions) -> Values:
    """Read the schema that ``options`` name: from the text, a file, or the registry. Raises ``Invalid``, ``NotFound``, …"""
    given = options.values
    assert given is not None, "a read without a format has no schema"
    schema = _given_schema(given)
    if schema is None:
        schema = _registered_schema(given, options)
    values = Values(
        format=given.format, schema=schema, message=given.message, registry=given.registry, is_permissive=given.is_permissive
    )
    values.kind()
    return values


def check_same_values(earlier: Values | None, options: ReadOptions) -> None:
    """Raise ``Invalid`` unless ``options`` decode values as ``earlier`` does. A registry may have a newer schema by now."""
    given = options.values
    if earlier is None or given is None:
        if earlier is not None or given is not None:
            raise Invalid(
                f"the target was begun with{'' if earlier else 'out'} value_format; use the same options, or another target"
            )
        return
    found = resolve(options) if given.has_schema else replace(earlier, format=given.format, registry=given.registry)
    if found != earlier or (given.message, given.is_permissive) != (earlier.message, earlier.is_permissive):
        raise Invalid("the target was begun with another format, schema or mode of values; use the same, or another target")


def _given_schema(given: ValueOptions) -> bytes | None:
    if given.schema_file:
        try:
            return Path(given.schema_file).read_bytes()
        except OSError as failed:
            raise Invalid(f"value_schema_file cannot be read: {failed}") from failed
    if not given.schema:
        return None
    if given.format != "protobuf":
        return given.schema.encode()
    try:
        return base64.b64decode(given.schema, validate=True)
    except ValueError:
        raise Invalid("value_schema must be a FileDescriptorSet in Base64 for Protobuf; value_schema_file is easier") from None


def _registered_schema(given: ValueOptions, options: ReadOptions) -> bytes:
    registry, subject = Registry(given.registry), given.subject or f"{_only_topic(options)}-value"
    if given.format == "protobuf":
        return registry.descriptors(subject)
    found = registry.of_subject(subject)
    _check_type(found, given.format, f"subject {subject!r}")
    return (registry.whole_avro(found) if given.format == "avro" else found.schema).encode()


def _only_topic(options: ReadOptions) -> str:
    wanted = options.wanted
    if isinstance(wanted, Subscribed) and len(wanted.topics) == 1:
        return wanted.topics[0]
    if isinstance(wanted, Assigned) and len(wanted.partitions) == 1:
        return next(iter(wanted.partitions))
    raise Invalid("several topics may be read, so name the schema to read their values by: value_subject, or value_schema")


def _check_type(found: RegisteredSchema, wanted: str, what: str) -> None:
    if found.schema_type.upper() != _REGISTRY_TYPES[wanted]:
        raise Invalid(f"{what} has a schema of {found.schema_type}, but value_format is {wanted}")
    if found.references and wanted == "json":
        raise Invalid(f"{what} refers to other schemas: give the whole schema by value_schema_file")


def _schema_id(content: bytes) -> tuple[int, bytes]:
    if len(content) < _PREFIX_BYTES or content[0]:
        raise ValueError("it does not begin with a zero byte and a schema's id")
    return int.from_bytes(content[1:_PREFIX_BYTES], "big"), content[_PREFIX_BYTES:]


def _indexes(body: bytes) -> tuple[tuple[int, ...], int]:
    """Return the message indexes at the start of ``body``, and their length: a count, and as many numbers, as varints."""
    count, at = _varint(body, 0)
    if not count:
        return (0,), at
    if not 0 < count <= len(body):
        raise ValueError(f"it claims {count} message indexes")
    indexes = []
    for _ in range(count):
        index, at = _varint(body, at)
        indexes.append(index)
    return tuple(indexes), at


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the zigzag varint at ``at``, and where it ends."""
    value = shift = 0
    while shift < 64:
        byte = body[at] if at < len(body) else -1
        if byte < 0:
            break
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at
        shift += 7
    raise ValueError("its message indexes are cut off")


class _ById(Generic[Item]):
    """Looks up each schema id once, by ``look_up``, which raises ``_Unusable`` for a schema that cannot be used."""

    def __init__(self, look_up: Callable[[int], Item]) -> None:
        self._look_up = look_up
        self._found: dict[int, Item] = {}
        self._refused: dict[int, str] = {}

    def of(self, schema_id: int) -> Item:
        """Return the result for the id. Raises ``ValueError`` if the id is unknown or its schema cannot be used."""
        if schema_id in self._found:
            return self._found[schema_id]
        if schema_id in self._refused:
            raise ValueError(self._refused[schema_id])
        try:
            found = self._found[schema_id] = self._look_up(schema_id)
        except (NotFound, _Unusable) as reason:
            self._refused[schema_id] = f"id {schema_id}: {reason.message}"
            if len(self._refused) > REFUSED_IDS_MAX:
                raise Invalid(
                    f"the registry has no usable schema for {len(self._refused)} schema ids of the values: is it the right "
                    "registry?"
                ) from None
            raise ValueError(self._refused[schema_id]) from None
        return found


class _Unusable(Invalid):
    """A registered schema cannot be used: values that were written with it do not decode."""


@contextmanager
def _unusable_if_invalid() -> Iterator[None]:
    """Raise ``_Unusable`` for errors in a schema. Requests that the registry refuses stay ``Invalid`` and fail the read."""
    try:
        yield
    except Invalid as wrong:
        raise _Unusable(wrong.message) from wrong


class _FramedAvro:
    """Decodes Avro by the schema that each value was written with, resolved to the reader's."""

    def __init__(self, registry: Registry, reader: Any) -> None:
        self._registry = registry
        self._reader = reader
        self._decoders: _ById[Decode] = _ById(self._decoder)

    def decode(self, content: bytes) -> Any:
        schema_id, body = _schema_id(content)
        return self._decoders.of(schema_id)(body)

    def _decoder(self, schema_id: int) -> Decode:
        found, avro = self._registry.by_id(schema_id), _avro()
        with _unusable_if_invalid():
            _check_type(found, "avro", "it")
        whole = self._registry.whole_avro(found)
        with _unusable_if_invalid():
            made: Decode = avro.decoder(avro.parse_schema(whole), self._reader)
        return made


class _FramedProtobuf:
    """Decodes Protobuf. A value's message indexes are those of the version of the schema that it was written with."""

    def __init__(self, registry: Registry, messages: ProtobufMessages) -> None:
        self._registry = registry
        self._messages = messages
        self._place = messages.place
        self._files: _ById[bytes] = _ById(self._file)
        self._names: dict[tuple[int, tuple[int, ...]], str] = {}
        """Names of messages by schema id and message indexes."""

    def decode(self, content: bytes) -> Any:
        schema_id, body = _schema_id(content)
        indexes, length = _indexes(body)
        name = self._names.get((schema_id, indexes))
        if name is None:
            name = self._names[schema_id, indexes] = self._name(schema_id, indexes)
        if name != self._messages.name:
            raise ValueError(f"it is message {name}, not {self._messages.name}")
        return self._messages.decode(body[length:])

    def _name(self, schema_id: int, indexes: tuple[int, ...]) -> str:
        """The name of the message that had these indexes when the value was written. Raises ``ValueError`` if none had.

        If that schema is unknown or unusable, as one with ``edition`` is, its messages may only be where the reader's are.
        """
        from stratalog_pipeline.value_formats.protobuf import message_name

        if indexes != self._place:
            return message_name(self._files.of(schema_id), indexes)
        try:
            file = self._file(schema_id)
        except (NotFound, _Unusable):
            return self._messages.name
        return message_name(file, indexes)

    def _file(self, schema_id: int) -> bytes:
        found = self._registry.by_id(schema_id, of_protobuf=True)
        with _unusable_if_invalid():
            _check_type(found, "protobuf", "it")
            return file_descriptor(found.schema, f"{schema_id}.proto", f"id {schema_id}")


class _Decoder:
    """Decodes the values of batches into one Arrow type."""

    def __init__(self, values: Values, kind: pa.DataType, decode: Decode, errors: tuple[type[Exception], ...]) -> None:
        self._values = values
        self._kind = kind
        self._decode = decode
        self._errors: tuple[type[Exception], ...] = (*errors, ValueError)

    def decoded(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        contents = batch.column("value").to_pylist()
        rows: list[Any] = []
        corrupt: list[bytes | None] = [None] * len(contents)
        for number, content in enumerate(contents):
            try:
                rows.append(None if content is None else self._decode(content))
            except self._errors as reason:
                corrupt[number] = self._permitted(batch, number, content, reason)
                rows.append(None)
        return {"value": self._column(batch, rows, contents, corrupt), CORRUPT_RECORD: pa.array(corrupt, pa.binary())}

    def _column(
        self, batch: pa.RecordBatch, rows: list[Any], contents: list[bytes | None], corrupt: list[bytes | None]
    ) -> pa.Array:
        try:
            return pa.array(rows, self._kind)
        except _ARROW_ERRORS:
            pass
        # Some values do not fit into their type, such as a decimal with more digits: find them.
        for number, row in enumerate(rows):
            try:
                pa.array([row], self._kind)
            except _ARROW_ERRORS as reason:
                corrupt[number] = self._permitted(batch, number, contents[number], reason)
                rows[number] = None
        return pa.array(rows, self._kind)

    def _permitted(self, batch: pa.RecordBatch, number: int, content: bytes | None, reason: Exception) -> bytes | None:
        """Return the bytes for ``CORRUPT_RECORD`` if the read is permissive; raises ``Corrupt`` otherwise."""
        if self._values.is_permissive:
            return content
        topic, partition, offset = (batch.column(name)[number].as_py() for name in PLACE)
        raise Corrupt(
            f"{topic}-{partition}, offset {offset}: the value cannot be decoded as {self._values.format}: {reason}; "
            f"value_mode=PERMISSIVE makes it null, with its bytes in column {CORRUPT_RECORD}"
        ) from reason


def _avro() -> Any:
    try:
        from stratalog_pipeline.value_formats import avro
    except ModuleNotFoundError as missing:
        if missing.name != "fastavro":
            raise
        raise Invalid("Avro needs fastavro: pip install 'stratalog[avro]', on driver and executors") from None
    return avro
