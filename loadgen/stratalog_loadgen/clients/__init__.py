"""Load clients: producers at full speed or at a fixed rate, consumers, members of groups, idle connections."""
