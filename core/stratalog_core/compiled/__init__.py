"""Building blocks of compiled kernels: numba's JIT, varints, a keyed hash. Importing a module of it loads numba: a second."""
