"""What a measurement found: histograms, gaps, result documents and their printed form."""
