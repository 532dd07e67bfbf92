"""Stratalog."""
