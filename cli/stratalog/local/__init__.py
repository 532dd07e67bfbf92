"""A local cluster of real processes below one data directory."""
