"""Ledger storage nodes (bookies) and the ledger client."""
