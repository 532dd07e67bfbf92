"""Measurements: each prepares topics, composes loads, runs them and reports the result."""
