"""Memory that is received into and reused, and the real size of views of it."""
