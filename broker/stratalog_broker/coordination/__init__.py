"""Coordinators that keep their state in internal topics, and the mapping from keys to coordinators."""
