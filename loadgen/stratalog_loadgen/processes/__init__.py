"""Load processes: their loads, their control, and their reports."""
