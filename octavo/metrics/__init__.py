"""What Octavo counts: `prometheus` holds it and writes it for Prometheus, `log_line` says it in one line for people."""
