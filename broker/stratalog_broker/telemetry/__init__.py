"""Metrics that clients push to the broker (KIP-714): their subscriptions, and the values of the last pushes."""
