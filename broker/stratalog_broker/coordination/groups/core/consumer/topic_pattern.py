"""Regular expressions over topic names in RE2's syntax, matched in linear time (KIP-848 uses RE2J).

A pattern comes from any client, so matching must not backtrack. It is parsed into a Thompson automaton, which is then run as a
deterministic one whose states are made when they are first needed. A match is of the whole name.

Supported is what can matter for topic names, whose characters are ASCII letters, digits, ``.``, ``_`` and ``-``: everything in
RE2's syntax except Unicode classes (``\\p{…}``). As in RE2, these are refused: references, look-around, possessive
repetition, more than a thousand repetitions.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from stratalog_core.errors import Invalid

STATES_MAX: Final = 4_000
"""Bound of the automaton's states: repetitions of repetitions multiply them."""
DEPTH_MAX: Final = 100
_CACHED_SETS_MAX: Final = 1_000
_REPETITIONS_MAX: Final = 1_000
NAME_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "._-")
_WORD: Final = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES: Final = {
    "d": frozenset(string.digits), "w": _WORD, "s": frozenset("\t\n\f\r "),
    "alnum": frozenset(string.ascii_letters + string.digits), "alpha": frozenset(string.ascii_letters),
    "ascii": frozenset(map(chr, range(128))), "blank": frozenset(" \t"), "cntrl": frozenset(map(chr, [*range(32), 127])),
    "digit": frozenset(string.digits), "graph": frozenset(map(chr, range(33, 127))),
    "lower": frozenset(string.ascii_lowercase), "print": frozenset(map(chr, range(32, 127))),
    "punct": frozenset(string.punctuation), "space": frozenset(string.whitespace), "upper": frozenset(string.ascii_uppercase),
    "word": _WORD, "xdigit": frozenset(string.hexdigits),
}  # fmt: skip
"""Perl's and POSIX's classes, restricted to ASCII as in RE2."""
_PERL_CLASSES: Final = tuple("\\" + letter for letter in "dwsDWS")
_OCTAL: Final = "01234567"
_CONTROLS: Final = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_BEGIN, _END, _BOUNDARY, _NO_BOUNDARY = "begin", "end", "boundary", "no boundary"


@dataclass(slots=True)
class _State:
    """Goes to ``then`` on one of ``characters``, or without a character if they are None and the ``condition`` holds."""

    characters: frozenset[str] | None = None
    condition: str = ""
    then: list[int] = field(default_factory=list)


_Fragment = tuple[int, int]
"""The first and the last state of a part; the last one has no successors yet."""


class TopicPattern:
    """A compiled pattern. Raises ``Invalid`` with the reason if the pattern is not valid."""

    def __init__(self, pattern: str) -> None:
        self._states: list[_State] = []
        self._first, self._last = _Parser(pattern, self._states).parse()
        self._next: dict[tuple[frozenset[int], str, str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        current, before = frozenset({self._first}), ""
        for character in name:
            key = (current, before, character)
            following = self._next.get(key)
            if following is None:
                following = self._step(current, before, character)
                if len(self._next) >= _CACHED_SETS_MAX:
                    self._next.clear()
                self._next[key] = following
            if not following:
                return False
            current, before = following, character
        return self._last in self._closure(current, before, "")

    def _step(self, current: frozenset[int], before: str, character: str) -> frozenset[int]:
        found: set[int] = set()
        for number in self._closure(current, before, character):
            state = self._states[number]
            if state.characters is not None and character in state.characters:
                found.update(state.then)
        return frozenset(found)

    def _closure(self, current: Iterable[int], before: str, after: str) -> set[int]:
        """Return the states that are reached without a character, between two characters (empty: the name's ends)."""
        seen, open_states = set(current), list(current)
        while open_states:
            state = self._states[open_states.pop()]
            if state.characters is None and _holds(state.condition, before, after):
                new = [number for number in state.then if number not in seen]
                seen.update(new)
                open_states += new
        return seen


def _holds(condition: str, before: str, after: str) -> bool:
    if condition in (_BOUNDARY, _NO_BOUNDARY):
        return ((before in _WORD) != (after in _WORD)) is (condition == _BOUNDARY)
    return not condition or not (before if condition == _BEGIN else after)


@functools.lru_cache(maxsize=1_000)
def compiled(pattern: str) -> TopicPattern:
    """Return the compiled pattern. Raises ``Invalid``."""
    return TopicPattern(pattern)


class _Parser:
    """Recursive descent over alternatives, sequences, repetitions and atoms; each returns a fragment of the automaton."""

    def __init__(self, pattern: str, states: list[_State]) -> None:
        self._pattern = pattern
        self._at = 0
        self._states = states
        self._ignores_case = False
        self._depth = 0
        self._group_names: set[str] = set()

    def parse(self) -> _Fragment:
        found = self._alternatives()
        if self._at < len(self._pattern):
            raise self._invalid("unmatched )")
        return found

    def _invalid(self, reason: str) -> Invalid:
        return Invalid(f"regular expression {self._pattern!r} is not valid at character {self._at}: {reason}")

    # -- states

    def _state(self, characters: frozenset[str] | None = None, condition: str = "") -> int:
        if len(self._states) >= STATES_MAX:
            raise self._invalid(f"it needs more than {STATES_MAX} states")
        self._states.append(_State(characters, condition))
        return len(self._states) - 1

    def _link(self, first: int, second: int) -> None:
        self._states[first].then.append(second)

    def _single(self, characters: frozenset[str] | None = None, condition: str = "") -> _Fragment:
        first, last = self._state(characters, condition), self._state()
        self._link(first, last)
        return first, last

    def _empty(self) -> _Fragment:
        return self._single()

    # -- text

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, expected: str) -> bool:
        if self._pattern.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _character(self, reason: str) -> str:
        found = self._peek()
        if not found:
            raise self._invalid(reason)
        self._at += 1
        return found

    def _until(self, end: str, reason: str) -> str:
        at = self._pattern.find(end, self._at)
        if at < 0:
            raise self._invalid(reason)
        text, self._at = self._pattern[self._at : at], at + len(end)
        return text

    # -- grammar

    def _alternatives(self) -> _Fragment:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._invalid(f"groups are nested deeper than {DEPTH_MAX}")
        fragments = [self._sequence()]
        while self._take("|"):
            fragments.append(self._sequence())
        self._depth -= 1
        if len(fragments) == 1:
            return fragments[0]
        first, last = self._state(), self._state()
        for fragment in fragments:
            self._link(first, fragment[0])
            self._link(fragment[1], last)
        return first, last

    def _sequence(self) -> _Fragment:
        first, last = self._empty()
        while self._peek() not in ("", "|", ")"):
            beginning = self._at
            fragment = self._repeated(self._atom(), beginning)
            self._link(last, fragment[0])
            last = fragment[1]
        return first, last

    def _repeated(self, fragment: _Fragment, beginning: int) -> _Fragment:
        """Read the operators after an atom, which begins at ``beginning``."""
        end, count = self._at, 0
        while (bounds := self._bounds()) is not None:
            count += 1
            if count > 1:
                raise self._invalid("a repetition is repeated")
            self._take("?")  # a lazy repetition matches the same names
            fragment = self._repeat(fragment, *bounds, beginning, end)
        return fragment

    def _bounds(self) -> tuple[int, int | None] | None:
        for operator, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(operator):
                return bounds
        return self._counted() if self._peek() == "{" else None

    def _counted(self) -> tuple[int, int | None] | None:
        """Read ``{n}``, ``{n,}`` or ``{n,m}``; anything else that begins with a brace is literal."""
        end = self._pattern.find("}", self._at)
        least, comma, most = self._pattern[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not _is_number(least) or (most and not _is_number(most)):
            return None
        self._at = end + 1
        bounds = int(least), int(most) if most else None if comma else int(least)
        if max(bounds[0], bounds[1] or 0) > _REPETITIONS_MAX or (bounds[1] is not None and bounds[1] < bounds[0]):
            raise self._invalid("bad repetition: at most 1000 times, the smaller number first")
        return bounds

    def _repeat(self, fragment: _Fragment, least: int, most: int | None, beginning: int, end: int) -> _Fragment:
        """Return the fragment repeated. Copies are made by parsing its text again."""
        first, last = self._state(), self._state()
        at, copies = first, max(least, most or 0, 1)
        for number in range(copies):
            part = fragment if number == 0 else self._parsed_again(beginning, end)
            if number >= least:
                self._link(at, last)
            self._link(at, part[0])
            at = part[1]
            if most is None and number == copies - 1:
                self._link(at, part[0])
        if most != 0:
            self._link(at, last)
        return first, last

    def _parsed_again(self, beginning: int, end: int) -> _Fragment:
        continued, names = self._at, set(self._group_names)
        self._at = beginning
        self._group_names.clear()
        fragment = self._atom()
        assert self._at == end, "the same text parses to the same atom"
        self._at, self._group_names = continued, names
        return fragment

    def _atom(self) -> _Fragment:
        character = self._character("an expression is missing")
        match character:
            case "(":
                return self._group()
            case "[":
                return self._single(self._folded(self._class()))
            case ".":
                return self._single(NAME_CHARACTERS)
            case "^":
                return self._single(condition=_BEGIN)
            case "$":
                return self._single(condition=_END)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._invalid("nothing to repeat")
        return self._single(self._folded(frozenset(character)))

    def _folded(self, characters: frozenset[str]) -> frozenset[str]:
        if not self._ignores_case:
            return characters
        return characters | {each.lower() for each in characters} | {each.upper() for each in characters}

    def _group(self) -> _Fragment:
        before = self._ignores_case
        if self._take("?"):
            if self._take("P<") or self._take("<"):
                self._name_group()
            elif not self._flags():
                return self._empty()  # flags for the rest of the enclosing group
        found = self._alternatives()
        if not self._take(")"):
            raise self._invalid("missing )")
        self._ignores_case = before
        return found

    def _name_group(self) -> None:
        if self._peek() in ("=", "!"):
            raise self._invalid("look-behind is not supported")
        name = self._until(">", "missing >")
        if not name or not _WORD.issuperset(name) or name in self._group_names:
            raise self._invalid(f"bad or repeated group name {name!r}")
        self._group_names.add(name)

    def _flags(self) -> bool:
        """Read flags; return whether a group follows. ``m``, ``s`` and ``U`` change nothing for a name, which is one line."""
        positive = True
        while True:
            match self._character("missing )"):
                case ":":
                    return True
                case ")":
                    return False
                case "i":
                    self._ignores_case = positive
                case "m" | "s" | "U":
                    pass
                case "-" if positive:
                    positive = False
                case other:
                    raise self._invalid(f"(?{other} is not supported")

    def _escape(self) -> _Fragment:
        character = self._character("trailing backslash")
        conditions = {"A": _BEGIN, "z": _END, "b": _BOUNDARY, "B": _NO_BOUNDARY}
        if character in conditions:
            return self._single(condition=conditions[character])
        if character == "Q":
            end = self._pattern.find("\\E", self._at)
            text = self._pattern[self._at : end if end >= 0 else None]
            self._at = end + 2 if end >= 0 else len(self._pattern)
            return self._literal(text)
        if character in "dwsDWS":
            return self._single(_perl_class(character))
        return self._single(self._folded(frozenset(self._escaped(character))))

    def _literal(self, text: str) -> _Fragment:
        first, last = self._empty()
        for character in text:
            fragment = self._single(self._folded(frozenset(character)))
            self._link(last, fragment[0])
            last = fragment[1]
        return first, last

    def _escaped(self, character: str) -> str:
        """Return the character for which an escape stands."""
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "x":
            if self._take("{"):
                return self._code(self._until("}", "missing }"), 16)
            self._at += 2
            return self._code(self._pattern[self._at - 2 : self._at], 16)
        if character in _OCTAL and (character == "0" or self._peek() in tuple(_OCTAL)):  # else it is a reference
            begin = self._at - 1
            while self._at < begin + 3 and self._peek() in tuple(_OCTAL):
                self._at += 1
            return self._code(self._pattern[begin : self._at], 8)
        if character in _WORD - {"_"} or not character.isascii():
            raise self._invalid(f"\\{character} is not supported")
        return character

    def _code(self, digits: str, base: int) -> str:
        try:
            return chr(int(digits, base))
        except (ValueError, OverflowError):
            raise self._invalid(f"bad character code {digits!r}") from None

    # -- classes

    def _class(self) -> frozenset[str]:
        is_negated = self._take("^")
        found: set[str] = set()
        is_first = True
        while is_first or not self._take("]"):
            is_first = False
            if self._take("[:"):
                found |= self._posix_class()
            elif self._pattern[self._at : self._at + 2] in _PERL_CLASSES:
                self._at += 2
                found |= _perl_class(self._pattern[self._at - 1])
            else:
                found |= self._range()
        folded = self._folded(frozenset(found))
        return NAME_CHARACTERS - folded if is_negated else folded

    def _posix_class(self) -> frozenset[str]:
        name = self._until(":]", "missing :]")
        characters = _CLASSES.get(name.removeprefix("^")) if len(name) > 1 else None
        if characters is None:
            raise self._invalid(f"unknown class [:{name}:]")
        return NAME_CHARACTERS - characters if name.startswith("^") else characters

    def _range(self) -> frozenset[str]:
        low = self._class_character()
        if self._peek() != "-" or self._pattern[self._at + 1 : self._at + 2] in ("]", ""):
            return frozenset(low)
        self._at += 1
        high = self._class_character()
        if high < low:
            raise self._invalid(f"bad range {low}-{high}")
        return frozenset(each for each in (*NAME_CHARACTERS, low, high) if low <= each <= high)

    def _class_character(self) -> str:
        character = self._character("missing ]")
        return self._escaped(self._character("trailing backslash")) if character == "\\" else character


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len("1000")


def _perl_class(letter: str) -> frozenset[str]:
    characters = _CLASSES[letter.lower()]
    return characters if letter.islower() else NAME_CHARACTERS - characters
