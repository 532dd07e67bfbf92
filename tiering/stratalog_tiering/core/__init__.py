"""Decisions of tiering without I/O: what to do next for a partition, and what each answer allows.

Every module takes state, time and randomness as arguments and returns what the callers in ``offload``, ``maintenance`` and
``worker`` carry out.
"""
