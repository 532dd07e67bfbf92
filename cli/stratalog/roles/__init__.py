"""Composition roots: here, and only here, configuration, environment, clock, disk and network become components."""
