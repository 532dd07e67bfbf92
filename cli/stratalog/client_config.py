"""Settings of Kafka clients that a command was given: one by one, or in a file, which keeps secrets out of its arguments.

A file has the form of ``java.util.Properties.load``, as those of ``--command-config`` of Kafka's tools, in UTF-8. The names are
librdkafka's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from stratalog.target import name_values
from stratalog_core.errors import Invalid

_SPACE: Final = " \t\f"
_ENTRY: Final = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u([0-9a-fA-F]{4})?|.)", re.DOTALL)
_CHARACTERS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SECRET: Final = re.compile(r"password|secret|token|credential|jaas|oauthbearer\.config|\.pem$", re.IGNORECASE)


def client_config(option: str, texts: Sequence[str], file: Path | None) -> dict[str, str]:
    """Return the settings of ``file`` and of ``texts``, as NAME=VALUE, which win. ``option`` is the name of the latter's.

    Warns of secrets in ``texts``. Raises ``Invalid`` for a malformed text or file.
    """
    given = name_values(texts)
    warn_of_secrets(option, given, f"give it in a file with {option}-file")
    if file is None:
        return given
    try:
        return {**parse_properties(file.read_text(encoding="utf-8-sig")), **given}
    except UnicodeDecodeError as malformed:
        raise Invalid(f"{option}-file {file} is not text in UTF-8: {malformed}") from malformed
    except Invalid as malformed:
        raise Invalid(f"{option}-file {file}: {malformed.message}") from malformed


def warn_of_secrets(option: str, names: Iterable[str], remedy: str) -> None:
    """Print a warning for each setting on the command line whose name says that it is a secret."""
    for name in names:
        if _SECRET.search(name):
            click.echo(
                f"warning: {option} {name}: other users of this machine can see the command's arguments; {remedy}", err=True
            )


def parse_properties(text: str) -> dict[str, str]:
    """Return the settings of a file of Java properties. Raises ``Invalid`` for an entry without a name, or a wrong escape."""
    found: dict[str, str] = {}
    for number, line in _logical_lines(text):
        match = _ENTRY.match(line)
        assert match is not None, "each part of the pattern may be empty"
        name = _unescaped(match[1], number)
        if not name:
            raise Invalid(f"line {number} has no name before its value")
        found[name] = _unescaped(match[2], number)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with settings, each with its number: without comments, and with those that a backslash continues."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        stripped = line.lstrip(_SPACE)
        if not begun:
            first = number
            if not stripped or stripped[0] in "#!":
                continue
        is_continued = (len(stripped) - len(stripped.rstrip("\\"))) % 2 == 1
        begun.append(stripped[:-1] if is_continued else stripped)
        if not is_continued:
            yield first, "".join(begun)
            begun = []
    if "".join(begun):
        yield first, "".join(begun)


def _unescaped(text: str, number: int) -> str:
    def character(escape: re.Match[str]) -> str:
        if escape[1][0] != "u":
            return _CHARACTERS.get(escape[1], escape[1])
        if escape[2] is None:
            raise Invalid(rf"line {number} has \u without four hexadecimal digits; write \\ for a backslash")
        return chr(int(escape[2], 16))

    return _ESCAPE.sub(character, text)
