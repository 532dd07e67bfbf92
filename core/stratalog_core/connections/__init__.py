"""Protocol between our processes: frames, and limits on memory and idle time of a port's connections. Pure: no I/O."""
