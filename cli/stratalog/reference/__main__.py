"""Writes the generated reference pages: ``python -m stratalog.reference DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

from stratalog.reference import PAGES

for name, page in PAGES.items():
    Path(sys.argv[1], name).write_text(page())
