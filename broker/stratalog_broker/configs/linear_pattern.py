"""Regular expressions that clients send, in RE2 syntax as in Kafka: which topics to read, which transactions to list.

RE2 matches in time linear in the text. Its factor depends on the expression, and one may be matched with every topic, so costly
ones are refused.
"""

from __future__ import annotations

from typing import Any, Final

from stratalog_core.errors import Invalid

_MEMORY_BYTES: Final = (1 << 15, 1 << 20)
"""Memory that RE2 may use for an expression, mostly to remember states: the first of these in which the program fits."""
COST_MAX: Final = 20_000
"""Branches of a compiled expression: at most about 0.1 ms for a topic's name. 200 alternatives of 30 characters have 7,500."""


class LinearPattern:
    """A compiled expression, for a whole text, with at most ``bytes_max`` bytes of memory. Raises ``Invalid`` if it is
    malformed or too large.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self.bytes_max = _compiled(pattern)
        # How many instructions have up to 2**0, 2**1, ... characters to look at next.
        cost = sum(count << exponent for exponent, count in enumerate(self._pattern.programfanout))
        if cost > COST_MAX:
            raise Invalid(f"the regular expression {pattern[:100]!r} has {cost} branches; maximum is {COST_MAX}: repeat less")

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        return self._pattern.fullmatch(text) is not None


def _compiled(pattern: str) -> tuple[Any, int]:
    """Return the expression and the memory that it may use. Raises ``Invalid``."""
    import re2  # only brokers whose clients send expressions load it

    options = re2.Options()
    options.log_errors = False
    for bytes_max in _MEMORY_BYTES:
        options.max_mem = bytes_max
        try:
            compiled = re2.compile(pattern, options)
        except re2.error as refused:
            malformed = refused
        else:
            re2.purge()  # The module would keep the last expressions, whatever memory they use.
            return compiled, bytes_max
    raise Invalid(f"{pattern[:100]!r} is no regular expression in RE2 syntax: {malformed}") from malformed
