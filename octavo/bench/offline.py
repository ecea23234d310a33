"""`octavo bench throughput` and `octavo bench latency`: measure the engine without a server.

vLLM's older names work too: `python -m octavo.benchmark_throughput` and `octavo.benchmark_latency`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.data import add_dataset_args, encode, sample_prompts
from octavo.bench.results import write_json
from octavo.config import EngineArgs
from octavo.engine.input_processor import PromptInput
from octavo.entrypoints.cli import command
from octavo.errors import ConfigError
from octavo.flags import FlagParser, positive_int
from octavo.lora.request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.processes import event_loop_factory
from octavo.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_throughput_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Measure the engine without a server.")
    add_dataset_args(parser)
    parser.add_argument("--backend", choices=("vllm", "octavo"), default="octavo", help="Both are this engine.")
    parser.add_argument(
        "--async-engine", action="store_true", help="Measure AsyncLLMEngine, whose core is a process of its own as a "
        "server's is, and whose answers come in pieces.",
    )  # fmt: skip
    parser.add_argument("--lora-path", metavar="PATH", help="An adapter for every request, with --enable-lora.")
    _add_engine_args(parser)
    return parser


def make_latency_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Measure one batch of requests.")
    group = parser.add_argument_group("batch")
    group.add_argument("--input-len", type=positive_int, default=32, help="Default: %(default)s tokens.")
    group.add_argument("--output-len", type=positive_int, default=128, help="Default: %(default)s tokens.")
    group.add_argument("--batch-size", type=positive_int, default=8, help="Requests (default: %(default)s).")
    group.add_argument("--num-iters", type=positive_int, default=30, help="Batches (default: %(default)s).")
    group.add_argument(
        "--num-iters-warmup", type=int, default=10, help="Batches before those that count (default: %(default)s)."
    )
    _add_engine_args(parser)
    # Otherwise every batch would find the previous batch's prompts in the cache.
    parser.set_defaults(enable_prefix_caching=False)
    return parser


@command(make_throughput_parser, "octavo bench throughput")
def throughput(args: argparse.Namespace) -> None:
    engine_args, adapter = _engine_args(args), _adapter(args)
    if args.async_engine:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            outputs, elapsed_s = runner.run(_generate_async(args, engine_args, adapter))
    else:
        from octavo.entrypoints.llm import LLM

        llm = LLM(**dataclasses.asdict(engine_args))
        prompts, params = _requests(args, llm.get_tokenizer(), llm.config.model.max_model_len)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty(), lora_request=adapter)
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


@command(make_latency_parser, "octavo bench latency")
def latency(args: argparse.Namespace) -> None:
    if args.num_iters_warmup < 0:
        raise ConfigError(f"--num-iters-warmup must be 0 or more, got {args.num_iters_warmup}.")
    from octavo.entrypoints.llm import LLM

    llm = LLM(**dataclasses.asdict(_engine_args(args)))
    _check_length(llm.config.model.max_model_len, args.input_len, args.output_len)
    rng = np.random.default_rng(args.seed or 0)
    ids = rng.integers(llm.config.model.vocab_size, size=(args.batch_size, args.input_len)).tolist()
    prompts: list[PromptInput] = [{"prompt_token_ids": tokens} for tokens in ids]
    params = _sampling_params(args, args.output_len)
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


def _add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add every engine flag, and the flags of sampling and output."""
    parser.add_argument("model_positional", metavar="MODEL", nargs="?", help="The same as --model.")
    parser.add_argument("--n", type=positive_int, default=1, help="Answers to each prompt (default: 1).")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1).")
    parser.add_argument("--disable-detokenize", action="store_true", help="Make no text of the tokens.")
    parser.add_argument("--json", "--output-json", dest="json", metavar="FILE", help="Write the figures there.")
    EngineArgs.add_cli_args(parser)


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    """Raises `ConfigError`."""
    if args.model_positional is not None:
        if args.model and args.model != args.model_positional:
            raise ConfigError(f"two models are given: {args.model_positional} and --model {args.model}.")
        args.model = args.model_positional
    if not args.temperature >= 0:
        raise ConfigError(f"--temperature must be 0 or more, got {args.temperature}.")
    return EngineArgs.from_cli_args(args)


def _adapter(args: argparse.Namespace) -> LoRARequest | None:
    """Raises `ConfigError`."""
    if args.lora_path is None:
        return None
    if not args.enable_lora:
        raise ConfigError("--lora-path needs --enable-lora.")
    return LoRARequest("adapter", 1, args.lora_path)


def _requests(
    args: argparse.Namespace, tokenizer: ModelTokenizer, max_model_len: int
) -> tuple[list[PromptInput], list[SamplingParams]]:
    """Return the prompts and their sampling parameters. Raises `ConfigError` for a prompt that does not fit."""
    prompts, params = list[PromptInput](), list[SamplingParams]()
    for request in sample_prompts(args, tokenizer):
        _check_length(max_model_len, request.num_tokens, request.num_output_tokens)
        prompts.append({"prompt_token_ids": encode(tokenizer, request.text)})
        params.append(_sampling_params(args, request.num_output_tokens))
    return prompts, params


async def _generate_async(
    args: argparse.Namespace, engine_args: EngineArgs, adapter: LoRARequest | None
) -> tuple[list[RequestOutput], float]:
    """Return the answers, and the seconds from sending all requests to a ready engine until the last answer."""
    from octavo.engine.async_engine import AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(engine_args)
    try:
        prompts, params = _requests(args, engine.tokenizer, engine.config.model.max_model_len)
        await engine.wait_ready()

        async def answer(number: int) -> RequestOutput:
            params[number].output_kind = RequestOutputKind.CUMULATIVE
            async for output in engine.generate(prompts[number], params[number], f"bench-{number}", adapter):
                last = output
            return last

        begin = time.perf_counter()
        outputs = await asyncio.gather(*map(answer, range(len(prompts))))
        return outputs, time.perf_counter() - begin
    finally:
        engine.shutdown()


def _sampling_params(args: argparse.Namespace, num_output_tokens: int) -> SamplingParams:
    """Return parameters for exactly `num_output_tokens` tokens: the model does not end its answers."""
    return SamplingParams(
        n=args.n, temperature=args.temperature, ignore_eos=True, max_tokens=num_output_tokens,
        detokenize=not args.disable_detokenize,
    )  # fmt: skip


def _check_length(max_model_len: int, num_input: int, num_output: int) -> None:
    """Raise `ConfigError` for a request that the engine would end early."""
    if num_input + num_output > max_model_len:
        raise ConfigError(
            f"{num_input} tokens of prompt and {num_output} of output are more than the engine's {max_model_len}; "
            "lower --input-len or --output-len, or raise --max-model-len."
        )
