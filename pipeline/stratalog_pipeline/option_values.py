"""Values of options as numbers, durations and choices. Keys of ``options`` are in lower case, whatever ``name`` is. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from stratalog_core.errors import Invalid

INTEGER_MAX: Final = 2**63 - 1


def natural(name: str, text: str, minimum: int) -> int:
    """Return the integer in ``text``. Raises ``Invalid`` if it is none, below ``minimum``, or above 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise Invalid(f"option {name!r} must be an integer, not {text!r}") from None
    if value < minimum:
        raise Invalid(f"option {name!r} is {value}; minimum is {minimum}")
    if value > INTEGER_MAX:
        raise Invalid(f"option {name!r} is {value}; maximum is {INTEGER_MAX}")
    return value


def integer(options: Mapping[str, str], name: str, default: int, minimum: int) -> int:
    """Return the option's integer. Raises as ``natural``."""
    return natural(name, options[name.lower()], minimum) if name.lower() in options else default


_UNITS_S: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def duration_s(options: Mapping[str, str], name: str, default_s: float) -> float:
    """Return a duration such as ``15m``, in seconds; a number alone counts milliseconds, as Spark's durations do."""
    text = options.get(name.lower())
    if text is None:
        return default_s
    match = re.fullmatch(r"\s*(\d{1,15})\s*([a-z]*)\s*", text.lower())
    if match is None or (match[2] or "ms") not in _UNITS_S:
        raise Invalid(f"option {name!r} must be a duration like 15m or 30s (units {', '.join(_UNITS_S)}), not {text!r}")
    return int(match[1]) * _UNITS_S[match[2] or "ms"]


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """Return whether the option is true."""
    return choice(options, name, ("true", "false") if default else ("false", "true")) == "true"


def choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return the option's value in lower case. The first choice is the default. Raises ``Invalid`` for any other value."""
    text = options.get(name.lower(), choices[0]).strip().lower()
    if text not in choices:
        raise Invalid(f"option {name!r} must be one of {', '.join(choices)}, not {text!r}")
    return text
