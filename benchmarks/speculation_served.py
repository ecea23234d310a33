"""What guessing costs over HTTP where there is nothing to guess: two servers, with and without, in turns.

    python benchmarks/speculation_served.py                                  # ngram, at 1, 4, 16 and 64 clients
    python benchmarks/speculation_served.py --speculative-config '{"method": "suffix"}' --clients 1 64

Prompts are tokens at random and answers are drawn at temperature 1, so that nothing repeats. A round asks the server
without, the one with, and the one without again, each other prompts; a ratio is of the second's output tokens a second
to the mean of the others. The last column is the third's to the first's: what the machine does by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.bench.serve import main as bench_serve
from tests.e2e.server import Server, running_server


def output_rate(server: Server, num_clients: int, seed: int, args: argparse.Namespace, folder: Path) -> float:
    """Output tokens a second of a closed loop of clients."""
    file = folder / "run.json"
    flags = [
        "--base-url", server.url, "--max-concurrency", str(num_clients), "--seed", str(seed), "--ignore-eos",
        "--num-prompts", str(max(2, args.waves * num_clients)), "--random-input-len", "32",
        "--random-output-len", str(max(32, args.output // num_clients)), "--temperature", "1",
        "--json", str(file), "--disable-tqdm",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        assert bench_serve(flags) == 0, "the load could not be sent"
    return float(json.loads(file.read_text())["output_throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculative-config", default='{"method": "ngram"}', metavar="JSON")
    parser.add_argument("--model", help="Default: SmolLM2-135M-Instruct.")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=2, help="Requests of each client in a round.")
    parser.add_argument(
        "--output", type=int, default=256, help="Tokens of an answer to one client; of N: a Nth, or 32."
    )
    args = parser.parse_args()
    flags = ["--disable-log-requests", "--disable-log-stats", *(["--model", args.model] if args.model else [])]
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        without = stack.enter_context(running_server(folders[0], *flags))
        guessing = stack.enter_context(
            running_server(folders[1], *flags, "--speculative-config", args.speculative_config)
        )
        print(
            "| clients | without, tok/s | with | ratio: median (least to most) | without again |\n|---|---|---|---|---|"
        )
        for clients in args.clients:
            rates: list[tuple[float, float, float]] = []
            for number in range(args.rounds + 1):  # the first one warms up
                first, second, third = (
                    output_rate(server, clients, 3 * number + turn, args, folders[0])
                    for turn, server in enumerate((without, guessing, without))
                )
                rates.append((first, second, third))
            rates = rates[1:]
            ratios = sorted(2 * second / (first + third) for first, second, third in rates)
            print(
                f"| {clients} | {statistics.median(first for first, _, _ in rates):.0f} "
                f"| {statistics.median(second for _, second, _ in rates):.0f} "
                f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) "
                f"| {statistics.median(third / first for first, _, third in rates):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
