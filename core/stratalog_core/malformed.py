"""What msgspec raises for bytes that are not what they should be: every decoder catches exactly this, and says its own error.

Besides its own errors msgspec lets two of Python's out: text that is not UTF-8, and nesting deeper than the interpreter's
stack, which a few hundred bytes are enough for, even within a field that nobody knows.
"""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
