"""Octavo's metrics: `prometheus` holds them and writes them for Prometheus, `log_line` logs them in one line for
people."""
