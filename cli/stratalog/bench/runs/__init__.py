"""Measurements: each prepares topics, composes loads, lets them work, and says what came out."""
