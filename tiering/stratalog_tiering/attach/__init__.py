"""Attaches history from elsewhere to a cluster as a new topic: from another bucket, or from the log files of Kafka."""
