"""Requests and replies between our processes over TCP: the real transport behind ``stratalog_core.ports``."""
