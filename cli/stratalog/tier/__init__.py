"""Behind ``stratalog tier``: reads metadata and the store directly, so that no broker needs to run."""
