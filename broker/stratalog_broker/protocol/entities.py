"""Decodes requests and builds and encodes responses with kio's messages, by API and version.

kio has one class per message, struct and version. With :class:`ResponseFactory` a handler is written once for all versions:
it names the struct and passes all fields it knows; fields that the version does not have are left out.
"""

from __future__ import annotations

import datetime
import functools
import io
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, Final

from kio.index import load_payload_module, load_request_schema
from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError
from kio.static.constants import EntityType

from stratalog_broker.protocol.request_lengths import checked_request
from stratalog_core.errors import Corrupt

_NO_THROTTLE: Final = datetime.timedelta(0)


@functools.cache
def _request_reader(api_key: int, api_version: int) -> Callable[..., tuple[Any, int]]:
    return entity_reader(load_request_schema(api_key, api_version))


def decode_request(api_key: int, api_version: int, body: memoryview) -> Any:
    """Return the request entity of a body. Raises ``Corrupt`` for malformed bytes.

    Trailing bytes are ignored, as in Apache Kafka: librdkafka 2.16 sends three after a Metadata request for all topics.
    """
    checked = checked_request(api_key, api_version, body)
    try:
        request, _ = _request_reader(api_key, api_version)(checked.toreadonly(), 0)
    except (SerialError, ValueError, OverflowError) as malformed:
        raise Corrupt(f"malformed request of API {api_key} v{api_version}: {malformed}") from malformed
    return request


def encode_response(entity: Any) -> bytes:
    """Return the bytes of a response entity, without its header."""
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()


Structs = Callable[..., Any]
"""Builds a struct from its name and fields: a ``ResponseFactory``, or one that adds fields of the request's context."""


class ResponseFactory:
    """Builds the structs of one API's response in one version."""

    __slots__ = ("_kinds", "_module")

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._kinds: dict[str, tuple[type[Any] | None, frozenset[str]]] = {}

    def __call__(self, kind: str, /, **values: Any) -> Any:
        """Return a struct of the named kind (``"MetadataResponsePartition"``), without fields that this version lacks.

        ``throttle_time`` is zero if it is not given. Returns None if this version lacks the kind.
        """
        known = self._kinds.get(kind) or self._look_up(kind)
        cls, names = known
        if cls is None:
            return None
        if "throttle_time" in names and "throttle_time" not in values:
            values["throttle_time"] = _NO_THROTTLE
        return cls(**{name: value for name, value in values.items() if name in names})

    def has(self, kind: str, field: str) -> bool:
        """Whether this version's struct of that kind has the field."""
        return field in (self._kinds.get(kind) or self._look_up(kind))[1]

    def _look_up(self, kind: str) -> tuple[type[Any] | None, frozenset[str]]:
        cls: type[Any] | None = getattr(self._module, kind, None)
        names = frozenset(field.name for field in fields(cls)) if cls is not None else frozenset()
        self._kinds[kind] = cls, names
        return cls, names


@functools.cache
def response_factory(api_key: int, api_version: int) -> ResponseFactory:
    return ResponseFactory(load_payload_module(api_key, api_version, EntityType.response))


@functools.cache
def request_factory(api_key: int, api_version: int) -> ResponseFactory:
    """Return what builds the structs of a request to another broker."""
    return ResponseFactory(load_payload_module(api_key, api_version, EntityType.request))


def load_message(api_key: int, api_version: int) -> None:
    """Load and cache what ``decode_request`` and ``response_factory`` need for this version: some 6 ms the first time."""
    _request_reader(api_key, api_version)
    response_factory(api_key, api_version)
