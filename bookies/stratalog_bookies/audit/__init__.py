"""The auditor: finds closed ledgers that lack copies, and makes them anew. ``docs/protocols/ledger.md`` explains it."""
