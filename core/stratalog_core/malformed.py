"""The exceptions that msgspec raises for malformed bytes. Decoders catch exactly these and raise their own error.

Besides its own errors, msgspec passes on two of Python's: for text that is not UTF-8, and for nesting deeper than the
interpreter's stack, which takes only a few hundred bytes, even within an unknown field.
"""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
