"""Numbers in text that a person or another program has written."""

from __future__ import annotations

import re
from typing import Final

_DIGITS: Final = re.compile(r"0*([0-9]{1,19})")


def natural_number(text: str, maximum: int = 2**63 - 1) -> int | None:
    """Return the number that the ASCII digits in ``text`` mean; None if it is anything else, or above ``maximum``.

    ``str.isdigit`` takes digits that ``int`` does not, such as ², and ``int`` refuses more than 4300 of them.
    """
    found = _DIGITS.fullmatch(text)
    number = int(found[1]) if found is not None else None
    return number if number is not None and number <= maximum else None
