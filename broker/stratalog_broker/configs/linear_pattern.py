"""Regular expressions that clients send, in RE2 syntax as in Kafka: which topics to read, which transactions to list.

RE2 matches in time linear in the text. Its factor depends on the expression, and one may be matched with every topic, so costly
ones are refused.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Invalid

_MEMORY_BYTES: Final = 1 << 20
COST_MAX: Final = 20_000
"""Branches of a compiled expression: at most about 0.1 ms for a topic's name. 200 alternatives of 30 characters have 7,500."""


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
        # How many instructions have up to 2**0, 2**1, ... characters to look at next.
        cost = sum(count << exponent for exponent, count in enumerate(self._pattern.programfanout))
        if cost > COST_MAX:
            raise Invalid(f"the regular expression {pattern[:100]!r} has {cost} branches; maximum is {COST_MAX}: repeat less")

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        return self._pattern.fullmatch(text) is not None
