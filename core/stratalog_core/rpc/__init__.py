"""Requests and replies between Stratalog's processes over TCP: the real transport behind ``stratalog_core.ports``."""
