"""`octavo bench throughput`: many requests given to `LLM` at once, and how many tokens a second come out of it.

Also `python -m octavo.benchmark_throughput`, vLLM's older name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from octavo.bench.data import add_dataset_args, encode, sample_prompts
from octavo.bench.offline import add_engine_args, check_length, make_llm, sampling_params
from octavo.bench.results import write_json
from octavo.engine.input_processor import PromptInput
from octavo.entrypoints.cli.errors import run_command
from octavo.flags import FlagParser


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo bench throughput") -> int:
    """Measure and print; returns the exit code."""
    parser = FlagParser(prog=prog, description="Measure the engine without a server.")
    add_dataset_args(parser)
    add_engine_args(parser)
    args = parser.parse_args(argv)

    def bench() -> None:
        llm = make_llm(args)
        requests = sample_prompts(args, llm.get_tokenizer())
        prompts: list[PromptInput] = []
        for request in requests:
            check_length(llm, request.num_tokens, request.num_output_tokens)
            prompts.append({"prompt_token_ids": encode(llm.get_tokenizer(), request.text)})
        params = [sampling_params(args, request.num_output_tokens) for request in requests]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        elapsed_s = time.perf_counter() - begin
        num_input = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        print(
            f"Throughput: {len(outputs) / elapsed_s:.2f} requests/s, {(num_input + num_output) / elapsed_s:.2f} total "
            f"tokens/s, {num_output / elapsed_s:.2f} output tokens/s"
        )
        print(f"Total num prompt tokens:  {num_input}\nTotal num output tokens:  {num_output}")
        if args.json is not None:
            figures = {
                "elapsed_time": elapsed_s,
                "num_requests": len(outputs),
                "total_num_tokens": num_input + num_output,
                "requests_per_second": len(outputs) / elapsed_s,
                "tokens_per_second": (num_input + num_output) / elapsed_s,
                "output_tokens_per_second": num_output / elapsed_s,
                "num_prompt_tokens": num_input,
                "num_output_tokens": num_output,
            }
            write_json(Path(args.json), figures)

    return run_command(bench)
