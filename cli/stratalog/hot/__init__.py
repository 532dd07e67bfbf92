"""Behind ``bookie`` and ``ledger``: what is hot, on which bookies. Speaks to metadata and to bookies, never to a broker."""
