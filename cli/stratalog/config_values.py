"""Topic configs as users give them, ``NAME=VALUE``. Brokers take no units: the number to give is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from stratalog.moments import UNIT_MS
from stratalog.target import name_values
from stratalog_core.errors import Invalid

_MS: Final = {"ms": 1, **UNIT_MS}
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def config_values(texts: Sequence[str]) -> dict[str, str]:
    """Return values by the configs' names. Raises ``Invalid``, also for a duration or a size with a unit."""
    values = name_values(texts)
    for name, value in values.items():
        number = _milliseconds(value) if name.endswith(".ms") else _bytes(value) if name.endswith(".bytes") else None
        if number is not None:
            unit = "milliseconds" if name.endswith(".ms") else "bytes"
            raise Invalid(f"{name} is {value}; it is a number of {unit}: give {number}")
    return values


def _milliseconds(text: str) -> str | None:
    """``7d`` → ``604800000``; None if it is no duration."""
    found = re.fullmatch(r"([0-9]{1,12}) ?(ms|[smhdw])", text.lower())
    return str(int(found[1]) * _MS[found[2]]) if found else None


def _bytes(text: str) -> str | None:
    """``1GiB`` → ``1073741824``; None if it is no size. Without an i the unit may be a power of 1000 or of 1024."""
    found = re.fullmatch(r"([0-9]{1,12}) ?([kmgt])(i?)b?", text.lower())
    if found is None:
        return None
    count, power = int(found[1]), _POWERS[found[2]]
    binary = str(count * 1024**power)
    return binary if found[3] else f"{binary} or {count * 1000**power}"
