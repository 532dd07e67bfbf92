"""Requests of Kafka's protocol from this broker to other brokers: ``core.py`` decides, ``channel.py`` is its shell."""
