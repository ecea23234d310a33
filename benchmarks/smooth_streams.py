"""How smooth streams are while prompts come in: servers with several bounds of a step, at several rates, over HTTP.

    python benchmarks/smooth_streams.py --plot streams.svg     # medians of three rounds; servers take turns
    python benchmarks/smooth_streams.py --rates 1 --dtype bfloat16 --vllm "vllm serve HuggingFaceTB/SmolLM2-135M"
    python benchmarks/smooth_streams.py --model /path/to/1B --rates 0.25 0.5

The first table has the load generator's figures. The second has the longest gap of one stream while a long prompt comes
in, and that prompt's first token beside and without the stream. The third is how well steps were predicted, out of
each server's metrics. `benchmarks/scheduling.py` simulates the same loads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.bench.plot import plot_sweep
from octavo.bench.serve import main as bench_serve
from tests.e2e.server import Server, running_server

SERVERS = {
    "2048 tokens": ["--target-step-time", "0"],
    "256 tokens": ["--target-step-time", "0", "--max-num-batched-tokens", "256"],
    "128 tokens": ["--target-step-time", "0", "--max-num-batched-tokens", "128"],
    "auto": [],
}
FIGURES = {
    "output tok/s": "output_throughput", "TTFT mean": "mean_ttft_ms", "TTFT p99": "p99_ttft_ms", "TPOT": "mean_tpot_ms",
    "ITL p99": "p99_itl_ms", "E2EL mean": "mean_e2el_ms",
}  # fmt: skip


@contextlib.contextmanager
def started(name: str, args: argparse.Namespace, folder: Path) -> Iterator[Server]:
    if name == "vLLM":
        with running_server(folder, command=shlex.split(args.vllm)) as server:
            yield server
        return
    flags = [*SERVERS[name], "--disable-log-requests", "--disable-log-stats", *shlex.split(args.server_flags)]
    flags += ["--model", args.model] if args.model else []
    flags += ["--dtype", args.dtype] if args.dtype else []
    with running_server(folder, *flags) as server:
        yield server


def load(server: Server, label: str, rate: float, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one run of the load generator. Each round has prompts of its own, so that none is cached."""
    file = folder / "run.json"
    flags = [
        "--base-url", server.url, "--label", label, "--request-rate", str(rate), "--num-prompts", str(args.requests),
        "--random-input-len", str(args.input), "--random-output-len", str(args.output), "--ignore-eos",
        "--seed", str(seed), "--json", str(file), "--disable-tqdm",
    ]  # fmt: skip
    flags += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    with contextlib.redirect_stdout(io.StringIO()):
        assert bench_serve(flags) == 0, "the load could not be sent"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return runs[0] | {key: statistics.median(run[key] for run in runs) for key in FIGURES.values()}


def beside_a_long_prompt(server: Server, num_tokens: int) -> tuple[float, float, float]:
    """-> longest gap of one stream, first token of a prompt beside it, and of one alone (ms)."""
    import httpx

    def prompt(seed: int) -> list[int]:
        return [1000 + (seed * 7919 + i * 31) % 20000 for i in range(num_tokens)]

    with httpx.Client(base_url=server.url, timeout=600) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]

        def ask(tokens: list[int], max_tokens: int) -> Iterator[float]:
            body = {"model": model, "prompt": tokens, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if '"text"' in line:
                        yield time.perf_counter()

        begin = time.perf_counter()
        alone_s = next(ask(prompt(1), 1)) - begin
        times: list[float] = []
        stream = threading.Thread(target=lambda: times.extend(ask([5, 6, 7], 600)))
        stream.start()
        time.sleep(0.3)
        begin = time.perf_counter()
        beside_s = next(ask(prompt(2), 1)) - begin
        end = time.perf_counter()
        stream.join()
        gaps = [b - a for a, b in itertools.pairwise(times) if begin <= b and a <= end]
    return 1e3 * max(gaps), 1e3 * beside_s, 1e3 * alone_s


def prediction_error(server: Server) -> str:
    """Which bounds the median and the 95th percentile of the relative error keep, and of how many steps."""
    median, high = (server.bound("octavo:step_time_error", share) for share in (0.5, 0.95))
    return f"| ≤ {median} | ≤ {high} | {server.count('octavo:step_time_error_count'):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4], help="Requests a second (default: 2 4).")
    parser.add_argument("--rounds", type=int, default=3, help="Whose medians are shown (default: %(default)s).")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[*SERVERS], help="Default: all.")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--long", type=int, default=8000, help="Tokens of the long prompt; 0: none (default: 8000).")
    parser.add_argument("--model", help="Default: SmolLM2-135M-Instruct.")
    parser.add_argument("--tokenizer", help="Default: the model's.")
    parser.add_argument("--dtype", help="Default: the model's.")
    parser.add_argument("--server-flags", default="", help="More flags of Octavo's servers, as one word.")
    parser.add_argument("--vllm", metavar="COMMAND", help="A server to compare with; --host and --port are added.")
    parser.add_argument("--plot", metavar="FILE", help="Draw throughput against latency.")
    parser.add_argument("--json", metavar="FILE", help="Write all figures.")
    args = parser.parse_args()
    names = [*args.servers, *(["vLLM"] if args.vllm else [])]
    runs: dict[tuple[float, str], list[dict[str, Any]]] = {(rate, name): [] for rate in args.rates for name in names}
    long_runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    errors = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(args.rounds):
            for name in names:
                with started(name, args, folder) as server:
                    for rate in args.rates:
                        print(f"round {number + 1}: {name}, {rate:g} requests/s", file=sys.stderr)
                        seed = 100 * number + args.rates.index(rate)
                        runs[rate, name].append(load(server, name, rate, seed, args, folder))
                    if args.long:
                        long_runs[name].append(beside_a_long_prompt(server, args.long))
                    if name != "vLLM":
                        errors[name] = prediction_error(server)
    points = [medians(found) for found in runs.values()]
    print("| load | server | " + " | ".join(FIGURES) + " |\n|---" + "|---" * (1 + len(FIGURES)) + "|")
    for (rate, name), point in zip(runs, points, strict=True):
        print(f"| {rate:g} requests/s | {name} | " + " | ".join(f"{point[key]:.0f}" for key in FIGURES.values()) + " |")
    if args.long:
        print(
            f"\n| a prompt of {args.long} tokens | longest gap of a stream | its first token | alone |\n"
            "|---|---|---|---|"
        )
        for name, found in long_runs.items():
            print(
                f"| {name} | "
                + " | ".join(f"{statistics.median(column):.0f}" for column in zip(*found, strict=True))
                + " |"
            )
    print("\n| error of step times | median | 95th percentile | steps |\n|---|---|---|---|")
    for name, error in errors.items():
        print(f"| {name} {error}")
    if args.plot:
        plot_sweep(Path(args.plot), points, 99)
    if args.json:
        Path(args.json).write_text(json.dumps(points, indent=1) + "\n")


if __name__ == "__main__":
    main()
