"""The HTTP endpoints of a process: ``/metrics``, ``/healthz`` and ``/readyz``, and the small server behind them."""
