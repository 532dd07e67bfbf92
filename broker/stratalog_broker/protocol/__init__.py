"""Kafka's wire protocol without I/O: headers, error codes, and the hand-written codecs of the hot messages."""
