"""`python -m octavo.benchmark_throughput`, which is `octavo bench throughput` under vLLM's older name."""

from __future__ import annotations

import sys

from octavo.bench.offline import throughput

if __name__ == "__main__":
    sys.exit(throughput(prog="octavo.benchmark_throughput"))
