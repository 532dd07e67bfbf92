"""What must hold during a run and at its end, and which states a run met."""
