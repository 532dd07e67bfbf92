"""The simulated world: event loop, clocks, network, disks, object store, machines and the real roles that run on them."""
