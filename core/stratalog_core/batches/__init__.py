"""Kafka record batches: their header, records, codecs, search by time, and checkpoint entries. Pure: no I/O."""
