"""`python -m octavo.benchmark_throughput`, which is `octavo bench throughput` under vLLM's older name."""

from __future__ import annotations

import sys

from octavo.bench.throughput import main

if __name__ == "__main__":
    sys.exit(main(prog="octavo.benchmark_throughput"))
