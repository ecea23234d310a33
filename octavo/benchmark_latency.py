"""`python -m octavo.benchmark_latency`, which is `octavo bench latency` under vLLM's older name."""

from __future__ import annotations

import sys

from octavo.bench.offline import latency

if __name__ == "__main__":
    sys.exit(latency(prog="octavo.benchmark_latency"))
