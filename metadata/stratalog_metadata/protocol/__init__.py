"""Messages between the nodes of the metadata quorum and their clients. No I/O."""
