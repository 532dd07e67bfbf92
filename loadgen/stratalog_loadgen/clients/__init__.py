"""The clients that make a load: producers at full speed or at a rate, consumers and members of groups, idle connections."""
