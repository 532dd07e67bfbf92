"""Cold replay and tiering over a real store, each measure beside its control: ``make bench-cold``."""
