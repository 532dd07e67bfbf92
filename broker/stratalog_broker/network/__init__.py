"""Client connections: listening, splitting frames, dispatching requests, and bounding the memory that clients occupy."""
