"""Results of a measurement: histograms, gaps, result documents and their printed form."""
