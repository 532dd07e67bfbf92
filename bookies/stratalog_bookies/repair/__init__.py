"""Keeps the copies of entries complete and intact: scrub, repair of corrupt entries, and the auditor."""
