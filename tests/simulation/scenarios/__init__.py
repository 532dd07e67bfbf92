"""Scenarios: which roles and clients run, which faults meet them, and how a run ends."""
