"""A schema registry that speaks Confluent's REST API. Reads only, over HTTP(S), a request at a time.

``STRATALOG_SCHEMA_REGISTRY_AUTH`` is ``USER:PASSWORD`` for basic authentication: of the driver and of the executors.
"""

from __future__ import annotations

import base64
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.value_formats.avro_references import with_referenced

AUTH_VARIABLE: Final = "STRATALOG_SCHEMA_REGISTRY_AUTH"
REQUEST_S_MAX: Final = 10.0
ATTEMPTS: Final = 4
SCHEMA_BYTES_MAX: Final = 16 * 1024 * 1024
REFERENCES_MAX: Final = 200
_WAIT_S: Final = 0.5
_LATER: Final = (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS)
"""Refusals after which the same request is repeated."""
_SERIALIZED: Final = "?format=serialized"
"""Asks for Protobuf's descriptors instead of text."""
_JSON: Final = "application/vnd.schemaregistry.v1+json, application/json"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A schema that another one refers to by ``name``; for Protobuf the path of its import."""

    name: str
    subject: str
    version: int


class RegisteredSchema(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A schema as the registry returns it. It has no type if it is of Avro."""

    schema: str
    schema_type: str = "AVRO"
    references: tuple[Reference, ...] = ()


class Registry:
    """The registry at ``url``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Invalid(f"value_registry must be a URL like https://registry:8081, not {url!r}")
        if parts.username is not None:
            raise Invalid(f"value_registry must not have credentials, which query plans show: set {AUTH_VARIABLE}")
        self._url = url.rstrip("/")

    def of_subject(self, subject: str, version: str = "latest") -> RegisteredSchema:
        """Return a version of a subject's schema. Raises ``NotFound``, ``Unavailable``, ``Invalid``."""
        return self._get(f"/subjects/{quote(subject, safe='')}/versions/{quote(version, safe='')}")

    def by_id(self, schema_id: int, *, of_protobuf: bool = False) -> RegisteredSchema:
        """Return the schema with an id, which never changes. Raises as ``of_subject`` does."""
        return self._get(f"/schemas/ids/{schema_id}" + (_SERIALIZED if of_protobuf else ""))

    def whole_avro(self, registered: RegisteredSchema) -> str:
        """Return an Avro schema with the types of the schemas that it refers to. Raises as ``of_subject`` does."""
        found: dict[tuple[str, int], str] = {}

        def add(references: Sequence[Reference]) -> None:
            for each in references:
                if (each.subject, each.version) not in found:
                    _check_count(found, each.subject)
                    referenced = self.of_subject(each.subject, str(each.version))
                    found[each.subject, each.version] = referenced.schema
                    add(referenced.references)

        add(registered.references)
        return with_referenced(registered.schema, list(found.values())) if found else registered.schema

    def descriptors(self, subject: str, version: str = "latest") -> bytes:
        """Return a subject's schema in Protobuf as a serialized FileDescriptorSet, with all files that it imports."""
        return _descriptor_set(self._files(f"{subject}.proto", subject, version))

    def _files(self, name: str, subject: str, version: str) -> Sequence[tuple[str, bytes]]:
        """Files by their names, each after those that it imports."""
        found: dict[str, bytes] = {}

        def add(name: str, subject: str, version: str) -> None:
            if name in found:
                return
            _check_count(found, subject)
            found[name] = b""
            path = f"/subjects/{quote(subject, safe='')}/versions/{quote(version, safe='')}{_SERIALIZED}"
            registered = self._get(path)
            for each in registered.references:
                add(each.name, each.subject, str(each.version))
            found.pop(name)
            found[name] = file_descriptor(registered.schema, name, f"subject {subject!r}")

        add(name, subject, version)
        return list(found.items())

    def _get(self, path: str) -> RegisteredSchema:
        content = self._request(path)
        try:
            return msgspec.json.decode(content, type=RegisteredSchema)
        except MALFORMED as malformed:
            raise Invalid(f"{self._url}{path} is not a schema registry's answer: {malformed}") from malformed

    def _request(self, path: str) -> bytes:
        request = urllib.request.Request(self._url + path, headers=_headers())
        for attempt in range(ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=REQUEST_S_MAX) as response:
                    return bytes(response.read(SCHEMA_BYTES_MAX))
            except urllib.error.HTTPError as refused:
                with refused:
                    if refused.code == http.HTTPStatus.NOT_FOUND:
                        raise NotFound(f"the registry has nothing at {self._url}{path}") from None
                    if refused.code < http.HTTPStatus.INTERNAL_SERVER_ERROR and refused.code not in _LATER:
                        raise Invalid(f"the registry refuses {self._url}{path}: {refused.code} {refused.reason}") from None
                    reason = f"{refused.code} {refused.reason}"
            except (OSError, http.client.HTTPException) as failed:
                reason = str(failed)
            if attempt + 1 < ATTEMPTS:
                time.sleep(_WAIT_S * 2**attempt)
        raise Unavailable(f"the registry does not answer at {self._url}{path}: {reason}")


def _check_count(found: Collection[object], subject: str) -> None:
    if len(found) >= REFERENCES_MAX:
        raise Invalid(f"a schema refers to more than {REFERENCES_MAX} others: subject {subject!r} is one too many")


def _headers() -> Mapping[str, str]:
    secret = os.environ.get(AUTH_VARIABLE, "")
    authorized = {"Authorization": "Basic " + base64.b64encode(secret.encode()).decode()} if secret else {}
    return {"Accept": _JSON, **authorized}


def file_descriptor(schema: str, name: str, what: str) -> bytes:
    """Return a file's descriptor, which a registry returns in Base64, or as text if it was registered so. Raises ``Invalid``.

    ``what`` names the schema in errors.
    """
    try:
        return base64.b64decode(schema, validate=True)
    except ValueError:
        pass
    from stratalog_pipeline.value_formats.proto_text import parse_proto

    try:
        return bytes(parse_proto(schema, name).SerializeToString())
    except Invalid as refused:
        raise Invalid(
            f"the registry's schema of {what} is not understood: {refused.message}; give value_schema_file, made by"
            " protoc --include_imports -o FILE"
        ) from None


def _descriptor_set(files: Sequence[tuple[str, bytes]]) -> bytes:
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    made = descriptor_pb2.FileDescriptorSet()
    for name, content in files:
        try:
            # A registry stores a file without its path; those that import it name it.
            made.file.add().MergeFromString(content)
        except DecodeError as malformed:
            raise Invalid(f"the registry's descriptor of {name!r} is malformed: {malformed}") from malformed
        made.file[-1].name = name
    return bytes(made.SerializeToString())
