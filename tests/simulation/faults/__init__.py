"""Faults: nemeses that choose them from the seed, and faults of single links."""
