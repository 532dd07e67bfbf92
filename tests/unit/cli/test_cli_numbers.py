"""Options that hold a number refuse what looks like one: digits that only Unicode has, and numbers beyond any limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer

from stratalog.app import stratalog
from stratalog.commands.consume import Start
from stratalog.commands.restore import cut_points
from stratalog.hot.quorum import split_node
from stratalog.local.ports import VARIABLE, free_ports
from stratalog.places import places
from stratalog_core.errors import Invalid
from stratalog_core.rpc.addresses import split_address
from stratalog_pipeline.value_formats.ddl import parse_ddl

NONE: Any = cast(Consumer, None)
NUMBERS = ["²", "9" * 5000]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "read",
    [
        lambda number: cut_points([f"0={number}"], None, ["flights"]),
        lambda number: cut_points([f"{number}=0"], None, ["flights"]),
        lambda number: Start(offset=number, moment=None, partitions=(0,)).place("flights", 0),
        lambda number: places(NONE, "flights", [0], number),
        lambda number: split_node(f"{number}=localhost:9300"),
        lambda number: split_address(f"localhost:{number}"),
        lambda number: parse_ddl(f"a decimal({number[:3]},0)"),
    ],
)
def test_it_is_an_error_of_the_option(read: Callable[[str], object], number: str) -> None:
    with pytest.raises(Invalid, match=re.escape(number[:3])):
        read(number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_port_is_an_error_of_the_option(number: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = CliRunner().invoke(stratalog, ["topic", "list", "--bootstrap", f"localhost:{number}"])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    monkeypatch.setenv(VARIABLE, f"20000-{number}")
    with pytest.raises(Invalid, match="use FIRST-LAST"):
        free_ports(1)
