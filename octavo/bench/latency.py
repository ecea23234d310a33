"""`octavo bench latency`: how long one batch of equal requests takes, again and again.

Also `python -m octavo.benchmark_latency`, vLLM's older name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.bench.data import positive_int
from octavo.bench.offline import add_engine_args, check_length, make_llm, sampling_params
from octavo.bench.results import write_json
from octavo.engine.input_processor import PromptInput
from octavo.entrypoints.cli.errors import run_command
from octavo.errors import ConfigError
from octavo.flags import FlagParser

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo bench latency") -> int:
    """Measure and print; returns the exit code."""
    parser = FlagParser(prog=prog, description="Measure one batch of requests.")
    group = parser.add_argument_group("batch")
    group.add_argument("--input-len", type=positive_int, default=32, help="Default: %(default)s tokens.")
    group.add_argument("--output-len", type=positive_int, default=128, help="Default: %(default)s tokens.")
    group.add_argument("--batch-size", type=positive_int, default=8, help="Requests (default: %(default)s).")
    group.add_argument("--num-iters", type=positive_int, default=30, help="Batches (default: %(default)s).")
    group.add_argument("--num-iters-warmup", type=int, default=10, help="Batches before (default: %(default)s).")
    add_engine_args(parser)
    # Every batch would find the prompts of the one before.
    parser.set_defaults(enable_prefix_caching=False)
    args = parser.parse_args(argv)

    def bench() -> None:
        if args.num_iters_warmup < 0:
            raise ConfigError(f"--num-iters-warmup must be 0 or more, got {args.num_iters_warmup}.")
        llm = make_llm(args)
        check_length(llm, args.input_len, args.output_len)
        rng = np.random.default_rng(args.seed or 0)
        ids = rng.integers(llm.config.model.vocab_size, size=(args.batch_size, args.input_len)).tolist()
        prompts: list[PromptInput] = [{"prompt_token_ids": tokens} for tokens in ids]
        params = sampling_params(args, args.output_len)
        times_s = []
        for i in range(-args.num_iters_warmup, args.num_iters):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i >= 0:
                times_s.append(time.perf_counter() - begin)
        percentiles = {str(p): float(np.percentile(times_s, p)) for p in _PERCENTILES}
        print(f"Avg latency: {np.mean(times_s):.4f} seconds")
        for percentile, seconds in percentiles.items():
            print(f"{percentile}% percentile latency: {seconds:.4f} seconds")
        if args.json is not None:
            figures = {"avg_latency": float(np.mean(times_s)), "latencies": times_s, "percentiles": percentiles}
            write_json(Path(args.json), figures)

    return run_command(bench)
