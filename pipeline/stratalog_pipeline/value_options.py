"""Options that say how values are decoded, parsed and checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from stratalog_core.errors import Invalid

Format: TypeAlias = Literal["avro", "json", "protobuf"]
VALUE_OPTIONS: Final = (
    "value_format", "value_schema", "value_schema_file", "value_registry", "value_subject", "value_message", "value_mode",
)  # fmt: skip
_FORMATS: Final = ("avro", "json", "protobuf")
_MODES: Final = ("failfast", "permissive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """How values are decoded. The schema to read them by is given (``schema``, or a file of the driver), or the latest one of
    ``subject`` in the registry at the URL ``registry``; an empty subject is TOPIC-value.

    ``message`` is the full name of a message of Protobuf, empty for the first. With a registry, values begin with the id of the
    schema that they were written with. ``is_permissive``: a value that does not decode becomes null, instead of an error.
    """

    format: Format
    schema: str = ""
    schema_file: str = ""
    registry: str = ""
    subject: str = ""
    message: str = ""
    is_permissive: bool = False

    @property
    def has_schema(self) -> bool:
        """Whether the schema is given, not registered."""
        return bool(self.schema or self.schema_file)


def parse_value_options(options: Mapping[str, str]) -> ValueOptions | None:
    """Return how values are decoded, from options with names in lower case; None: not at all. Raises ``Invalid``."""
    given = {name.removeprefix("value_"): text.strip() for name, text in options.items() if name.startswith("value_")}
    if "format" not in given:
        if given:
            raise Invalid(f"option 'value_{next(iter(given))}' needs value_format: avro, json or protobuf")
        return None
    if options.get("table", "records").strip().lower() != "records":
        raise Invalid("option 'value_format' is for records: leave out option 'table'")
    sources = [f"value_{name}" for name in ("schema", "schema_file") if given.get(name)]
    if len(sources) > 1 or not (sources or given.get("registry")):
        raise Invalid("value_format needs a schema: give one of value_schema, value_schema_file and value_registry")
    if given.get("subject") and (sources or not given.get("registry")):
        raise Invalid("option 'value_subject' names a schema in value_registry, so no other may be given")
    value_format, mode = _one_of(given, "format", _FORMATS), _one_of(given, "mode", _MODES)
    if given.get("message") and value_format != "protobuf":
        raise Invalid("option 'value_message' is for value_format=protobuf")
    return ValueOptions(
        format=cast("Format", value_format),
        schema=given.get("schema", ""),
        schema_file=given.get("schema_file", ""),
        registry=given.get("registry", ""),
        subject=given.get("subject", ""),
        message=given.get("message", ""),
        is_permissive=mode == "permissive",
    )


def _one_of(given: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return the option's value in lower case; the first choice without one."""
    text = given.get(name, choices[0]).lower()
    if text not in choices:
        raise Invalid(f"option 'value_{name}' must be one of {', '.join(choices)}, not {text!r}")
    return text
