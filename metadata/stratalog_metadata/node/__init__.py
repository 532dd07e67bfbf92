"""One node of the metadata quorum: the shell around the Raft core and the state machine, and the requests that it answers."""
