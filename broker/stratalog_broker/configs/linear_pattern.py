"""Regular expressions that clients send, in RE2 syntax as in Kafka. RE2 matches in linear time, so none can stop the broker."""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Invalid

_MEMORY_BYTES: Final = 1 << 20


class LinearPattern:
    """A compiled expression, for a whole text. Raises ``Invalid`` if it is malformed or too large."""

    def __init__(self, pattern: str) -> None:
        import re2  # only brokers whose clients send expressions load it

        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MEMORY_BYTES
        try:
            self._pattern = re2.compile(pattern, options)
        except re2.error as malformed:
            raise Invalid(f"{pattern[:100]!r} is no regular expression in RE2 syntax: {malformed}") from malformed

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        return self._pattern.fullmatch(text) is not None
