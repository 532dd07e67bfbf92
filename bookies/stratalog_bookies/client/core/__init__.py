"""The rules of writing, reading, recovering and placing ledgers. A core: no I/O, no clock; randomness is passed in."""
