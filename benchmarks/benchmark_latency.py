"""`python benchmarks/benchmark_latency.py` is `octavo bench latency`, where guides to vLLM look for it."""

import sys

from octavo.bench.offline import latency

if __name__ == "__main__":
    sys.exit(latency(prog="benchmark_latency.py"))
