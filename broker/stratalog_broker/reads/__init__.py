"""Reading partitions from the tail cache, the bookies and the object store, and searching them by time."""
