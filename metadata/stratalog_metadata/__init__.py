"""The metadata quorum: a replicated state machine of typed, versioned records."""
