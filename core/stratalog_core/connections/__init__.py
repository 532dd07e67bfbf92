"""Protocol between Stratalog's processes: frames, and limits on a port's memory and its idle connections. Pure: no I/O."""
