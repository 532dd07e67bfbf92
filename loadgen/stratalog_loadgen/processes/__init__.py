"""Load processes: what they are told, how they are started and controlled, and what they report."""
