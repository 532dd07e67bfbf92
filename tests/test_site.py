"""The documentation as a site: it builds without a warning, and a built page loads nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
_STYLE_URL = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"](?:https?:)?//")


class _Loaded(HTMLParser):
    """Addresses of other hosts that a page makes a browser load, and the classes of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.classes.update((values.get("class") or "").split())
        address = values.get(_LOADING.get(tag, "")) or ""
        if re.match(r"(?:https?:)?//", address) and values.get("rel") != "canonical":
            self.external.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built site."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    external = []
    for page in pages:
        parser = _Loaded()
        parser.feed(page.read_text())
        assert "mermaid" not in parser.classes, f"{page}: the theme would load Mermaid from the network"
        external += [f"{page.relative_to(site)}: {address}" for address in parser.external]
    assert external == []


def test_style_sheets_load_nothing_from_the_network(site: Path) -> None:
    sheets = [*site.rglob("*.css"), *site.rglob("*.html")]
    assert [sheet.name for sheet in sheets if _STYLE_URL.search(sheet.read_text())] == []
