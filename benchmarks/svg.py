"""What all pictures of the page share: colours that do on light and dark pages, and the document around the shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.sax.saxutils import escape

BETTER: Final = "#2a9d8f"
WORSE: Final = "#d1495b"
INK: Final = "#808080"


def document(title: str, width: int, height: int, shapes: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            f'<text x="8" y="22" font-size="15">{escape(title)}</text>',
            *shapes,
            "</svg>\n",
        ]
    )
