"""Commands and options of Kafka's tools, rpk and kcat, and configs with units, are answered with ours."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from stratalog import app
from stratalog.app import stratalog
from stratalog.commands.topic import _matching
from stratalog.config_values import config_values
from stratalog.usage_hints import no_such_option
from stratalog_core.errors import Invalid


def _explained(words: str) -> str:
    """Return the message of a command line with a wrong name."""
    try:
        stratalog.main(words.split(), standalone_mode=False)
    except click.NoSuchOption as wrong:
        return no_such_option(wrong).format_message()
    except click.UsageError as wrong:
        return wrong.format_message()
    raise AssertionError(words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("topic info events", "Did you mean 'describe'?"),
        ("topic ls", "Did you mean 'list'?"),
        ("topic consume events", "Did you mean 'stratalog consume'?"),
        ("topic creat events", "Did you mean 'create'?"),
        ("cluster info", "Did you mean 'status'?"),
        ("cluster create", "Did you mean 'start'?"),
        ("group seek readers", "Did you mean 'reset'?"),
        ("server", "Did you mean 'up'?"),
        ("version", "Did you mean 'stratalog --version'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        ("topic xyzzy", "No such command 'xyzzy'."),
        ("consume events -n 3", "Did you mean '--count'?"),
        ("consume events -c 3", "Did you mean '--count'?"),
        ("topic create events -c retention.ms=1", "Did you mean '--config'?"),
        ("consume events -p 0", "Did you mean '--partition'?"),
        ("topic create events -p 3", "Did you mean '--partitions'?"),
        ("consume events --from-beginning", "Did you mean '--offset earliest, the default'?"),
        ("topic list --bootstrap-server a:1", "Did you mean '--bootstrap'?"),
        ("topic list -b a:1", "Did you mean '--bootstrap'?"),
        ("broker list --bootstrap a:1", "Did you mean '--metadata'?"),
        ("group reset readers events --to-earliest", "Did you mean '--to earliest'?"),
        ("up --port 9092", "Did you mean '--kafka'?"),
        ("topic create --topic events", "Give the value without it, as NAME."),
        ("consume -t events", "Give the value without it, as TOPIC."),
        ("group describe --group readers", "Give the value without it, as NAME."),
        ("--bootstrap a:1 topic list", "Options follow the command."),
        ("topic create events --partition 3", "Did you mean '--partitions'?"),
    ],
)
def test_a_name_of_another_tool_is_answered_with_ours(words: str, hint: str) -> None:
    assert _explained(words).endswith(hint)


def test_the_help_shows_every_command_once() -> None:
    sections = [name for names in app._SECTIONS.values() for name in names]
    assert sorted(sections) == sorted(app._COMMANDS)
    shown = CliRunner().invoke(stratalog, ["--help"]).stdout
    assert all(f"\n  {name} " in shown for name in app._COMMANDS)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("retention.ms=7d", "retention.ms is 7d; it is a number of milliseconds: give 604800000"),
        ("log.retention.ms=90s", "give 90000"),
        ("segment.ms=500ms", "give 500"),
        ("segment.bytes=1GiB", "it is a number of bytes: give 1073741824"),
        ("retention.bytes=10MB", "give 10485760 or 10000000"),
        ("retention.bytes=10 m", "give 10485760 or 10000000"),
    ],
)
def test_a_config_with_a_unit_is_answered_with_the_number(text: str, remedy: str) -> None:
    with pytest.raises(Invalid) as refused:
        config_values([text])
    assert refused.value.message.endswith(remedy)


def test_other_values_are_for_the_broker_to_judge() -> None:
    texts = ["retention.ms=-1", "cleanup.policy=compact", "segment.bytes=much", "min.insync.replicas=2m"]
    assert config_values(texts) == dict(text.split("=") for text in texts)


def test_a_pattern_selects_whole_names() -> None:
    names = ["events", "events-2", "orders"]
    assert [name for name in names if _matching("events.*")(name)] == ["events", "events-2"]
    assert [name for name in names if _matching("events")(name)] == ["events"]
    assert [name for name in names if _matching(None)(name)] == names
    with pytest.raises(Invalid, match="is not a regular expression"):
        _matching("*")
