"""Settings of a component: a frozen dataclass whose fields carry unit, bounds, default and help.

``load`` validates, and nothing else does. Precedence: command line, environment, file, default. An unknown name is refused, and
the error suggests the nearest known name. The reference page is generated from the same metadata.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from stratalog_core.errors import Invalid

Settings = TypeVar("Settings")
_MISSING = dataclasses.MISSING
FILE_BYTES_MAX = 1024 * 1024


def setting(
    default: Any = _MISSING,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Return a dataclass field with its bounds. The field's name ends with its unit (``_ms``, ``_bytes``, ``_s``)."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def load(
    cls: type[Settings],
    *,
    section: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Load ``cls`` from the TOML table ``[section]`` of ``file``, ``STRATALOG_<SECTION>_<NAME>`` and ``overrides``.

    Field types served: ``str``, ``int``, ``float``, ``bool``, ``tuple[str, ...]`` (a comma-separated text outside TOML).
    Raises ``Invalid``; its message names the source, the field, the limit and the remedy.
    """
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if file is not None:
        values.update(_checked(fields, _read_table(file, section), f"{file} [{section}]"))
    prefix = f"STRATALOG_{section.upper()}_"
    from_environment = {name[len(prefix) :].lower(): text for name, text in (environ or {}).items() if name.startswith(prefix)}
    values.update(_checked(fields, from_environment, "environment"))
    values.update(_checked(fields, {k: v for k, v in (overrides or {}).items() if v is not None}, "command line"))
    missing = [name for name, field in fields.items() if field.default is _MISSING and name not in values]
    if missing:
        raise Invalid(
            f"setting {missing[0]!r} of [{section}] has no default: set it in the file or as {prefix}{missing[0].upper()}"
        )
    return cls(**values)


def _read_table(file: Path, section: str) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as failure:
        raise Invalid(f"cannot read configuration {file}: {failure.strerror}") from failure
    if len(content) > FILE_BYTES_MAX:
        raise Invalid(f"configuration {file} is longer than {FILE_BYTES_MAX} bytes: is it the right file?")
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as malformed:  # not TOML, not UTF-8, an integer of thousands of digits, nested too deep
        raise Invalid(f"{file} is not valid TOML: {malformed}") from malformed
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise Invalid(f"{file}: [{section}] must be a table")
    return table


def _checked(fields: Mapping[str, dataclasses.Field[Any]], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {name: _convert(_known(fields, name, source), value, source) for name, value in given.items()}


def _known(fields: Mapping[str, dataclasses.Field[Any]], name: str, source: str) -> dataclasses.Field[Any]:
    if name in fields:
        return fields[name]
    near = difflib.get_close_matches(name, fields, 1)
    raise Invalid(f"{source}: unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _convert(field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    kind = str(field.type)
    try:
        converted = _CONVERSIONS[kind](value)
    except (TypeError, ValueError, OverflowError) as wrong:
        raise Invalid(f"{source}: {field.name} must be {kind}, not {_shown(value)}") from wrong
    low, high, choices = field.metadata["minimum"], field.metadata["maximum"], field.metadata["choices"]
    if low is not None and converted < low:
        raise Invalid(f"{source}: {field.name} is {_shown(converted)}; minimum is {low}")
    if high is not None and converted > high:
        raise Invalid(f"{source}: {field.name} is {_shown(converted)}; maximum is {high}")
    if choices is not None and converted not in choices:
        raise Invalid(f"{source}: {field.name} is {_shown(converted)}; choose one of {', '.join(choices)}")
    return converted


def _shown(value: Any) -> str:
    """Return the beginning of a value, for an error message. Python refuses to print integers of thousands of digits."""
    return "an integer of more than 64 bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)[:200]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _FLAGS:
        raise ValueError(value)
    return _FLAGS[str(value).lower()]


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(_text(part) for part in value)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_CONVERSIONS = {"str": _text, "int": _integer, "float": _number, "bool": _flag, "tuple[str, ...]": _texts}
