"""Seconds from `octavo serve` to the first 200 of /health: python benchmarks/ready.py [--runs 5] [serve flags]"""

from __future__ import annotations

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request


def seconds_to_ready(flags: list[str]) -> float:
    """Start a server on a free port, time it, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "serve", "--host", "127.0.0.1", "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                    if response.status == 200:
                        return time.perf_counter() - started
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
        raise SystemExit(f"the server ended with status {process.returncode}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args, flags = parser.parse_known_args()
    times = [seconds_to_ready(flags) for _ in range(args.runs + 1)][1:]  # the first run warms the disk cache
    print(f"ready after {min(times):.2f} / {statistics.median(times):.2f} / {max(times):.2f} s (least, median, most)")


if __name__ == "__main__":
    main()
