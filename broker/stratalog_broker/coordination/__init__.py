"""Coordinators whose state is kept in internal topics, and how a key finds its coordinator."""
