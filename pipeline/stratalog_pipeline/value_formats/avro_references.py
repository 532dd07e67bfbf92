"""Inlines the types of other schemas in a registry into an Avro schema that references them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stratalog_core.errors import Invalid

_NAMED: Final = ("record", "error", "enum", "fixed")


def with_referenced(schema: str, referenced: Sequence[str]) -> str:
    """Return ``schema`` with each type of ``referenced`` defined where it is named first. Raises ``Invalid``."""
    try:
        documents = [json.loads(each) for each in referenced]
        definitions = {_full_name(each, ""): each for each in documents if isinstance(each, Mapping) and "name" in each}
        return json.dumps(_Inlining(definitions).of(json.loads(schema), ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as malformed:
        raise Invalid(f"this is not an Avro schema, or one of its references is none: {malformed!r}") from malformed


class _Inlining:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._defined: set[str] = set()

    def of(self, schema: Any, namespace: str) -> Any:
        """Return a schema, found within ``namespace``, with the types that are not defined yet."""
        if isinstance(schema, str):
            return self._named(schema, namespace)
        if isinstance(schema, list):
            return [self.of(each, namespace) for each in schema]
        kind = schema["type"]
        if kind in _NAMED:
            name = _full_name(schema, namespace)
            self._defined.add(name)
            within = name.rpartition(".")[0]
            fields = [{**field, "type": self.of(field["type"], within)} for field in schema.get("fields", ())]
            # An empty namespace must be given: without it, the one around would be the name's.
            made = {**schema, "name": name.rpartition(".")[2], "namespace": within}
            return {**made, "fields": fields} if "fields" in schema else made
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            return {**schema, part: self.of(schema[part], namespace)}
        return {**schema, "type": self.of(kind, namespace)}

    def _named(self, name: str, namespace: str) -> Any:
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if full in self._defined or full not in self._definitions:
            return name
        return self.of(self._definitions[full], "")


def _full_name(schema: Mapping[str, Any], namespace: str) -> str:
    name: str = schema["name"]
    if "." in name:
        return name
    namespace = schema.get("namespace", namespace)
    return f"{namespace}.{name}" if namespace else name
