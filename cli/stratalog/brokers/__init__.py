"""Brokers as operators see them: rows of a listing, draining and putting back."""
