"""Invariants during a run and at its end, and the states that a run reached."""
