"""Speaks any version of any API to a broker, with kio's messages: what no real client can be made to send."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

CLIENT_ID = "wire"


class WireClient:
    """One connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation_id = 0

    async def send(self, api_key: int, version: int, **values: Any) -> Any:
        """The response to a request with these fields; those that the version lacks are left out."""
        schema = load_request_schema(api_key, version)
        self._correlation_id += 1
        header = schema.__header_schema__
        head = build(header, request_api_key=api_key, request_api_version=version, correlation_id=self._correlation_id,
                     client_id=CLIENT_ID)  # fmt: skip
        frame = _encode(head) + _encode(build(schema, **values))
        self._writer.write(len(frame).to_bytes(4, "big") + frame)
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        answer = await self._reader.readexactly(size)
        response = load_response_schema(api_key, version)
        _, position = entity_reader(response.__header_schema__)(answer, 0)
        entity, consumed = entity_reader(response)(answer, position)
        assert position + consumed == size
        return entity


def build(schema: type[Any], **values: Any) -> Any:
    known = {field.name for field in fields(schema)}
    return schema(**{name: value for name, value in values.items() if name in known})


def part(api_key: int, version: int, kind: str, **values: Any) -> Any:
    """A struct within a request, or None if the version has none of this kind."""
    schema = getattr(load_payload_module(api_key, version, EntityType.request), kind, None)
    return build(schema, **values) if schema is not None else None


def _encode(entity: Any) -> bytes:
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()


@asynccontextmanager
async def connect(bootstrap: str) -> AsyncIterator[WireClient]:
    host, port = bootstrap.split(",")[0].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield WireClient(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()
