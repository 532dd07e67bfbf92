"""Connections: listening, cutting frames, dispatching requests, and bounding what clients make the broker hold."""
