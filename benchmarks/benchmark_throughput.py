"""`python benchmarks/benchmark_throughput.py` is `octavo bench throughput`, where guides to vLLM look for it."""

import sys

from octavo.bench.offline import throughput

if __name__ == "__main__":
    sys.exit(throughput(prog="benchmark_throughput.py"))
