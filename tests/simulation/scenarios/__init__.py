"""Scenarios: the roles and clients of a run, its faults, and its end."""
