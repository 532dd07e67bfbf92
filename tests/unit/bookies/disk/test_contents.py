"""The contents of a disk: the greatest ledger id outlives ledgers, tombstones and restarts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.disk.core.checkpoint import decode_state, encode_state
from stratalog_bookies.disk.core.contents import Contents

STEPS = st.lists(st.tuples(st.sampled_from(("make", "delete", "restart")), st.integers(0, 20)))


@given(STEPS)
def test_the_greatest_ledger_id_is_never_forgotten(steps: list[tuple[str, int]]) -> None:
    contents, greatest = Contents(index_bytes_max=0, tombstones_max=2), -1
    for step, ledger_id in steps:
        if step == "restart":
            stored = decode_state(encode_state(contents.state(1)))
            contents = Contents(index_bytes_max=0, tombstones_max=2)
            contents.restore(stored)
        elif step == "delete":
            contents.delete(ledger_id)
            greatest = max(greatest, ledger_id)
        elif ledger_id not in contents.tombstones:
            contents.ledger(ledger_id)
            greatest = max(greatest, ledger_id)
        contents.validate_state()
        assert contents.greatest_ledger_id == greatest
