"""The decisions of scrub and auditor: which copies are missing and where they move. A core: no I/O."""
