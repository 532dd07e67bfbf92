"""Patterns of topic names: RE2's syntax, the same answers as Python's ``re``, in linear time."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_core.errors import Invalid

PIECES = [
    "a",
    "b",
    "1",
    "_",
    "-",
    ".",
    "|",
    "*",
    "+",
    "?",
    "(",
    ")",
    "[",
    "]",
    "^",
    "$",
    "{",
    "}",
    "2",
    ",",
    "\\d",
    "\\w",
    "\\b",
]
NAMES = st.text("ab12_-.", max_size=6)


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(NAMES, max_size=5))
@example("[\\b]", [])
def test_patterns_match_what_python_matches(pattern: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            expected = re.compile(pattern, re.ASCII)
        except re.error:
            assume(False)
    try:
        compiled = LinearPattern(pattern)
    except Invalid:
        # Python takes \b in a class for a backspace; RE2 refuses it.
        refused = r"[*+?}][+*]|[*+?}]\??\{|\[.*\\b"
        assert re.search(refused, pattern), "only repeated repetitions, possessive ones and \\b in a class are refused"
        return
    assert [compiled.matches(name) for name in names] == [bool(expected.fullmatch(name)) for name in names]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("^foo$", "foo"), ("(a|b){2,3}c?", "abbc"), ("(?i)FOO-x", "foo-X"), ("(?i:A)b", "ab"),
        ("(?i:a)|b", "A"), ("\\Qa.b\\E", "a.b"), ("\\Qa.b", "a.b"), ("(?P<n>a)(?<m>b)", "ab"), ("[[:alpha:]]+\\d", "abc7"),
        ("[^[:digit:]]", "a"), ("[[:^alpha:]]", "7"), ("\\Aab\\z", "ab"), ("a\\Bb", "ab"), ("\\x61\\x{62}", "ab"),
        ("\\141|\\061", "1"), ("a{,3}", "a{,3}"), ("x{0}", ""), ("a*?b", "aab"), ("(?s-i)a", "a"), ("\\S\\D\\W", "aa-"),
        ("a{2}", "aa"), ("(?P<n>a){2}", "aa"), ("[a-]", "-"), ("[]a]", "a"), ("[\\w.]+", "a.b_c"), ("[\\-]", "-"), ("\\.", "."),
    ],
)  # fmt: skip
def test_syntax_of_re2(pattern: str, name: str) -> None:
    compiled = LinearPattern(pattern)
    assert compiled.matches(name)
    assert not compiled.matches(name + "\N{SNOWMAN}")


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "*a", "a**", "a++", "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "\\1", "a{1001}", "a{2,1}", "[a",
     "[z-a]", "[[:nothing:]]", "[[:alpha", "(?P<>a)", "(?P<n", "(?x)a", "(?", "\\", "[\\", "\\x{zz}", "\\x",
     "((a{1000}){1000})", "\\x{110000}"],
)  # fmt: skip
def test_what_re2_does_not_know_is_refused(pattern: str) -> None:
    with pytest.raises(Invalid, match="regular expression"):
        LinearPattern(pattern)


def test_matching_does_not_backtrack() -> None:
    assert not LinearPattern("(a*)*b").matches("a" * 249)
    assert not LinearPattern("(a|a)*(a|aa)+$x").matches("a" * 249)
    assert LinearPattern("(a?){100}a{100}").matches("a" * 149)


@pytest.mark.parametrize("pattern", ["(.?){660}", "((.?){30}){30}", "([a-m]?[h-z]?){400}", "(a?){200}a{200}"])
def test_a_pattern_that_costs_much_for_each_name_is_refused(pattern: str) -> None:
    """The coordinator matches all topics in one go: a millisecond for each of 10,000 would cost it its session."""
    with pytest.raises(Invalid, match=r"regular expression .* repeat less"):
        LinearPattern(pattern)


def test_long_lists_of_names_are_accepted() -> None:
    names = [f"{number * 7_919 % 10_007}-orders-of-team-{number}" for number in range(200)]
    pattern = LinearPattern(f"prod\\.({'|'.join(names)})(-dlq)?|.*-(foo|bar)-.*")
    assert all(pattern.matches(f"prod.{name}-dlq") for name in names)
    assert [pattern.matches(name) for name in ("prod.x", "a-foo-b", "a-foo")] == [False, True, False]
    assert LinearPattern("foo.*").matches("foobar")
