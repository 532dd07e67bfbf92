"""The partitions that this broker owns: takeover, appends, ledgers, handover."""
