"""Kafka's rules for the names and configs of topics: for brokers, and for whatever else makes topics."""
