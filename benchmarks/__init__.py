"""Measurements against Apache Kafka in the same run."""
